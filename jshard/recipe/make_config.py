"""The config of a run: its recipe's, with what the user sets."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.config.overrides import override, read_words
from jshard.config.run_config import Config, check, complete
from jshard.recipe.definition import Recipe
from jshard.recipe.model_map import FROM, SOURCE, require_map, take_architecture


def read_keys(recipe: Recipe, words: Mapping[str, str]) -> dict[str, Any]:
    """Converts words of the command line, by dotted key, to values for `make_config`.

    Raises:
      UserError: A key is unknown or has an impossible value.
    """
    _map_of_source(recipe, words)
    config = complete(recipe.get_config(), recipe.name)
    return read_words(config, words, recipe.name)


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
    config = complete(recipe.get_config(), recipe.name)
    if mapped := _map_of_source(recipe, overrides):
        override(config, {SOURCE: overrides[SOURCE]}, recipe.name)
        if config.model[FROM]:
            take_architecture(config, mapped, workdir)
    override(config, overrides, recipe.name)
    check(config)
    return config


def _map_of_source(
    recipe: Recipe, overrides: Mapping[str, Any]
) -> types.ModuleType | None:
    """Returns the map of the folder that `model.from` names; None if it is not given.

    Raises:
      UserError: The recipe has no such map, so no such key either.
    """
    if SOURCE not in overrides:
        return None
    folder = Path(str(overrides[SOURCE]))
    why = f"--config.{SOURCE}={folder} names a Hugging Face folder"
    return require_map(recipe.map_of(folder), recipe.name, why)
