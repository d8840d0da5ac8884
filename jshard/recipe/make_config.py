"""The config of a run: its recipe's, with what the user sets."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.overrides import override, read_words, with_values
from jshard.recipe.config.run_config import check, complete, declarations, flatten
from jshard.recipe.config.shared_keys import DEFAULTS
from jshard.recipe.definition import Recipe
from jshard.recipe.model_map import IGNORED, SOURCE, require_map, take_architecture
from jshard.storage.hub.online.download import pin, pin_mixture
from jshard.system.cli.knob import Knob
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json


def read_keys(
    recipe: Recipe, words: Mapping[str, str], workdir: Path | None = None
) -> dict[str, Any]:
    """Converts words of the command line, by dotted key, to values for `make_config`.

    Names on the Hugging Face Hub get their commits here, once for all that follows.

    Raises:
      UserError: A key is unknown or has an impossible value.
    """
    words = {**words, **pin_words(recipe, words, workdir)}
    return read_words(_defaults(recipe, words, workdir), words, recipe.name)


def make_config(
    recipe: Recipe, overrides: Mapping[str, Any], workdir: Path | None = None
) -> ConfigDict:
    """Returns a recipe's config with overrides applied, complete and checked.

    `model.from` sets the keys of the architecture first, so that those that are given
    win. Names on the Hugging Face Hub get the commits that they stand for.

    Overrides are values by dotted key; there may be a run to resume in `workdir`.

    Raises:
      UserError: A key is unknown or has an impossible value, or `model.from` names no
        folder of a known architecture.
    """
    config = _defaults(recipe, overrides, workdir)
    rest = {key: value for key, value in overrides.items() if key != SOURCE}
    override(config, rest, recipe.name)
    pin_names(config, workdir)
    check(config)
    return config


def recorded_config(
    recipe: Recipe, recorded: Mapping[str, Any], step: Path, given: Mapping[str, Any]
) -> ConfigDict:
    """Returns a recipe's config with the values that a run recorded.

    Args:
      recipe: The run's.
      recorded: The config in a checkpoint of the run.
      step: The checkpoint, for messages.
      given: Values by dotted key that take the place of the run's.

    Raises:
      UserError: As of `take_recorded`.
    """
    config = complete(recipe.get_config(), recipe.name)
    take_recorded(config, recorded, step)
    return with_values(config, given)


def take_recorded(config: ConfigDict, recorded: Mapping[str, Any], step: Path) -> None:
    """Sets the keys of a recipe's config to the values in a run's checkpoint.

    Raises:
      UserError: The checkpoint has a value where the recipe has a group of keys, or a
        group where it has a value.
    """
    with config.unlocked(), config.ignore_type():
        for name, value in recorded.items():
            if name not in config:
                continue  # the recipe was edited since
            is_group = isinstance(config[name], ConfigDict)
            if is_group != isinstance(value, Mapping):
                raise UserError(
                    f"checkpoint {step}: its config has {name}={str(value)[:80]}, and "
                    f"the recipe has {'a group' if is_group else 'a value'} there: the "
                    "run was of another recipe"
                )
            if is_group:
                take_recorded(config[name], value, step)
            else:
                config[name] = tuple(value) if isinstance(value, list) else value


def changed_keys(recipe: Recipe, config: ConfigDict) -> list[str]:
    """Returns the keys of a complete config whose values are not the recipe's."""
    defaults = {key: declared.default for key, declared in DEFAULTS.items()}
    defaults |= flatten(recipe.get_config())
    return [
        key
        for key, value in flatten(config).items()
        if key not in defaults or defaults[key] != value
    ]


def pin_names(config: ConfigDict, workdir: Path | None) -> None:
    """Adds to names on the Hugging Face Hub in a config the commits they stand for.

    Those that a run in the folder has recorded stay, so that it is resumed with them.

    Raises:
      UserError: There is no such name, or the Hub does not answer.
    """
    pinned = _pinned(flatten(config), declarations(config), workdir)
    config.update_from_flattened_dict(pinned)


def pin_words(
    recipe: Recipe, words: Mapping[str, str], workdir: Path | None
) -> dict[str, str]:
    """Returns those words that may be names on the Hub, as `pin_names` sets them.

    For process 0 of a job: the others are to take the same commits, and not to ask.
    """
    declared = declarations(complete(recipe.get_config(), recipe.name))
    return _pinned(words, declared, workdir)


def _pinned(
    values: Mapping[str, Any], declared: Mapping[str, Knob], workdir: Path | None
) -> dict[str, str]:
    recorded: Mapping[str, Any] = {}
    if workdir is not None:
        # No run, or one that is reported when it is resumed.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            recorded = flatten(read_json(workdir / "config.json"))
    names = {key: values[key] for key in values if key in declared}
    names = {key: text for key, text in names.items() if text and declared[key].hub}
    for key, text in names.items():
        known = (recorded.get(key), *names.values())  # a name is one commit in all keys
        knob = declared[key]
        pins = pin_mixture if knob.mixture else pin
        names[key] = pins(text, knob.hub, known)
    return names


def _defaults(
    recipe: Recipe, given: Mapping[str, Any], workdir: Path | None
) -> ConfigDict:
    """Returns a recipe's config, with the architecture of `model.from` if it is given.

    Raises:
      UserError: The recipe has no map of such a folder, so no such key either.
    """
    config = complete(recipe.get_config(), recipe.name)
    if SOURCE in given:
        source = str(given[SOURCE])
        why = f"--config.{SOURCE}={source} names a Hugging Face folder"
        require_map(recipe.huggingface or recipe.timm, recipe.name, why)
        ignored = {IGNORED: given[IGNORED]} if IGNORED in given else {}
        override(config, {SOURCE: source, **ignored}, recipe.name)
        if source:
            pin_names(config, workdir)
            map_of = lambda path: require_map(recipe.map_of(path), recipe.name, why)
            take_architecture(config, map_of, workdir)
    return config
