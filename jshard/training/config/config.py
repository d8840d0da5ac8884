"""The config of a run: a recipe's own keys, and those that every recipe shares."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from ml_collections import ConfigDict, FieldReference

from jshard.cli.paths import path_problem
from jshard.errors import UserError
from jshard.knob import Knob
from jshard.training.config.shared_keys import COMMON, DEFAULTS, REQUIRED, SHARED
from jshard.training.keys import Key

# An ml_collections.ConfigDict; type checkers cannot know its keys.
Config: TypeAlias = Any

# Keys and groups that say what is trained, and on which data in which order: a run
# that goes on with others is another run.
MEANING = ("model", "data", "batch_size", "seed")


def complete(config: Config, recipe: str) -> Config:
    """Adds the shared keys that a recipe leaves at their defaults.

    Args:
      config: What the recipe's `get_config` returned.
      recipe: The recipe's name, for messages.

    Returns:
      A config with every shared key.

    Raises:
      UserError: The config is no `ConfigDict`, lacks a required key, has an unknown
        one among the shared, or one of the wrong type.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of recipe {recipe} returns {type(config).__name__}; "
            "it must return an ml_collections.ConfigDict"
        )
    for key in REQUIRED:
        if key not in config:
            raise UserError(f"get_config() of recipe {recipe} lacks the key {key!r}")
    values: dict[str, Any] = {}
    for key, declaration in DEFAULTS.items():
        _set(values, key, declaration.default)
    try:
        _merge(values, config)
    except ValueError as error:
        raise UserError(f"get_config() of recipe {recipe}: {error}") from None
    return ConfigDict(values).lock()


def _merge(values: dict[str, Any], config: Config, prefix: str = "") -> None:
    """Puts a recipe's values over the shared ones.

    Raises:
      ValueError: A key or a value cannot be.
    """
    for name, value in config.items(preserve_field_references=True):
        key = f"{prefix}{name}"
        plain = value.get() if isinstance(value, FieldReference) else value
        if members := [shared for shared in SHARED if shared.startswith(f"{key}.")]:
            if not isinstance(plain, ConfigDict):
                raise ValueError(
                    f"{key}={plain!r}: {key} is a group: {', '.join(members)}"
                )
            _merge(values, plain, f"{key}.")
        elif key in SHARED:
            declaration = SHARED[key]
            if not declaration.is_type_of(plain):
                raise ValueError(f"{key}={plain!r}: expected {declaration.possible()}")
            _set(values, key, value)
        elif hint := _misspelt(key, config, prefix):
            raise ValueError(f"unknown key {key!r}{hint}")
        else:
            values[name] = value


def _misspelt(key: str, config: Config, prefix: str) -> str:
    """What a key that is not shared should have been; empty for a recipe's own."""
    if prefix:  # within a shared group, where no recipe has its own
        members = [shared for shared in SHARED if shared.startswith(prefix)]
        return nearest(key, members) or f"; possible: {', '.join(members)}"
    names = {shared.split(".")[0] for shared in SHARED}
    return nearest(key, names - set(config), cutoff=0.8)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a shared key in nested dicts; references of the recipe stay references."""
    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    if not isinstance(value, FieldReference):
        declaration = SHARED[key]
        if declaration.kind is float and type(value) is int:
            value = float(value)
        if declaration.also:
            value = FieldReference(value, field_type=object)
    values[name] = value


def declarations(config: Config, prefix: str = "") -> dict[str, Knob]:
    """Returns what is declared of every key, by its flattened name.

    Args:
      config: With every shared key.
      prefix: Of the names.
    """
    found: dict[str, Knob] = {}
    for name, value in config.items(preserve_field_references=True):
        key = f"{prefix}{name}"
        if isinstance(value, ConfigDict):
            found |= declarations(value, f"{key}.")
        elif key in SHARED:
            found[key] = SHARED[key]
        elif isinstance(value, Key):
            found[key] = value.knob
        elif key in COMMON and COMMON[key].is_type_of(config[name]):
            found[key] = COMMON[key]
        else:
            found[key] = _undeclared(config[name], config.get_type(name))
    return found


def _undeclared(value: Any, kind: type) -> Knob:
    """A plain value, which bounds nothing but its type."""
    if kind is type(None):
        kind = object
    also = (None,) if value is None or kind is str else ()
    return Knob(value, "", kind=kind, also=also)


def flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """Returns a config as `{"optimizer.learning_rate": 1e-3, ...}`."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict | dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_within(key: str, groups: Iterable[str]) -> bool:
    """Returns whether a flattened key is one of these, or lies in one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns "; did you mean X?" for the most similar name, or ""."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]}?" if matches else ""


def check(config: Config) -> None:
    """Raises a UserError for keys that are out of range or at odds."""
    flat = flatten(config)
    for key, declaration in declarations(config).items():
        problem = declaration.problem(flat[key])
        if declaration.kind is Path:
            problem = problem or path_problem(flat[key])
        if problem:
            raise UserError(f"--config.{key}={flat[key]}: {problem}")
    _check_best(config)
    _check_restore(config.checkpoint)
    for entry in map(str, config.checkpoint.accept):
        if entry not in MEANING and not any(is_within(key, [entry]) for key in flat):
            raise UserError(
                f"--config.checkpoint.accept={entry}: the recipe has no such key or "
                f"group{nearest(entry, flat)}"
            )


def _check_best(config: Config) -> None:
    best = config.checkpoint.best
    if not best:
        return
    if not best.startswith("eval_"):
        raise UserError(
            f"--config.checkpoint.best={best}: must be a metric of evaluations, such "
            "as eval_loss"
        )
    for key in ("eval_every", "checkpoint.every"):
        if not flatten(config)[key]:
            raise UserError(
                f"--config.checkpoint.best={best}: needs --config.{key} above 0"
            )


def _check_restore(checkpoint: Config) -> None:
    if not checkpoint.restore_optimizer:
        return
    if not checkpoint.restore:
        raise UserError(
            "--config.checkpoint.restore_optimizer=True: from where? give "
            "--config.checkpoint.restore too"
        )
    if checkpoint.restore.endswith(".safetensors"):
        raise UserError(
            "--config.checkpoint.restore_optimizer=True: "
            f"{checkpoint.restore} has parameters only"
        )
