"""The config of a run: its recipe's, with what the user sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.config.overrides import override, read_words
from jshard.config.run_config import Config, check, complete
from jshard.recipe.definition import Recipe
from jshard.recipe.model_map import SOURCE, require_map, take_architecture


def read_keys(
    recipe: Recipe, words: Mapping[str, str], workdir: Path | None = None
) -> dict[str, Any]:
    """Converts words of the command line, by dotted key, to values for `make_config`.

    Raises:
      UserError: A key is unknown or has an impossible value.
    """
    return read_words(_defaults(recipe, words, workdir), words, recipe.name)


def make_config(
    recipe: Recipe, overrides: Mapping[str, Any], workdir: Path | None = None
) -> Config:
    """Returns a recipe's config with overrides applied, complete and checked.

    `model.from` sets the keys of the architecture first, so that those that are given
    win.

    Args:
      recipe: The recipe.
      overrides: Values by dotted key.
      workdir: The run's folder, if there may be a run to resume.

    Raises:
      UserError: A key is unknown or has an impossible value, or `model.from` names no
        folder of a known architecture.
    """
    config = _defaults(recipe, overrides, workdir)
    override(config, overrides, recipe.name)
    check(config)
    return config


def _defaults(recipe: Recipe, given: Mapping[str, Any], workdir: Path | None) -> Config:
    """Returns a recipe's config, with the architecture of `model.from` if it is given.

    Raises:
      UserError: The recipe has no map of such a folder, so no such key either.
    """
    config = complete(recipe.get_config(), recipe.name)
    if SOURCE in given:
        folder = str(given[SOURCE])
        why = f"--config.{SOURCE}={folder} names a Hugging Face folder"
        mapped = require_map(recipe.map_of(Path(folder)), recipe.name, why)
        override(config, {SOURCE: folder}, recipe.name)
        if folder:
            take_architecture(config, mapped, workdir)
    return config
