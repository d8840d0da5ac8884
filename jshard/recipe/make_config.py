"""The config of a run, from its recipe and the command line."""

from collections.abc import Mapping
from pathlib import Path

from jshard.config.parser import override
from jshard.config.run_config import Config, check, complete
from jshard.recipe.definition import Recipe
from jshard.recipe.model_map import FROM, SOURCE, require_map, take_architecture


def make_config(
    recipe: Recipe, overrides: Mapping[str, str], workdir: Path | None = None
) -> Config:
    """Returns a recipe's config with overrides applied, complete and checked.

    `model.from` sets the keys of the architecture first, so that those on the command
    line win.

    Args:
      recipe: The recipe.
      overrides: Text by dotted key.
      workdir: The run's folder, if there may be a run to resume.

    Raises:
      UserError: A key is unknown or has an impossible value, or `model.from` names no
        folder of a known architecture.
    """
    config = complete(recipe.get_config(), recipe.name)
    if SOURCE in overrides:
        why = f"--config.{SOURCE}={overrides[SOURCE]} names a Hugging Face folder"
        mapped = recipe.map_of(Path(overrides[SOURCE]))
        mapped = require_map(mapped, recipe.name, why)
        override(config, {SOURCE: overrides[SOURCE]}, recipe.name)
        if config.model[FROM]:
            take_architecture(config, mapped, workdir)
    override(config, dict(overrides), recipe.name)
    check(config)
    return config
