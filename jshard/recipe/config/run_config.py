"""The config of a run: a recipe's own keys, and those that every recipe shares."""

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jshard.recipe.config.keys import Key
from jshard.recipe.config.profiled_steps import profile_problem
from jshard.recipe.config.settings import MOST_STEPS
from jshard.recipe.config.shared_keys import COMMON, DEFAULTS, REQUIRED, SHARED
from jshard.system.cli.knob import Knob
from jshard.system.cli.options import check_value
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

# Keys and groups that define what is trained, on which data, and in which order. A run
# is not resumed with other values of these.
MEANING = ("model", "data", "batch_size", "seed")
_EPOCHS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?epochs?")


def complete(config: ConfigDict, recipe: str, where: str = "") -> ConfigDict:
    """Returns a recipe's config with every shared key.

    Args:
      config: What the recipe's `get_config` returned.
      recipe: The recipe's name, for messages.
      where: What holds the config, for messages, if not its `get_config`.

    Raises:
      UserError: The config is not a `ConfigDict`, lacks a required key, or has an
        unknown shared key or one of the wrong type.
    """
    where = where or f"get_config() of recipe {recipe}"
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"{where} returns {type(config).__name__}; "
            "it must return an ml_collections.ConfigDict"
        )
    for key in REQUIRED:
        if key not in config:
            raise UserError(f"{where} lacks the key {key!r}")
    values: dict[str, Any] = {}
    for key, declared in DEFAULTS.items():
        _set(values, key, declared.default)
    try:
        _merge(values, config)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return ConfigDict(values).lock()


def epochs_in(steps: Any) -> Fraction | None:
    """Returns the epochs of steps such as "3epochs"; None of a number of steps."""
    found = _EPOCHS.fullmatch(steps) if isinstance(steps, str) else None
    return Fraction(found[1]) if found else None


def _merge(values: dict[str, Any], config: ConfigDict, prefix: str = "") -> None:
    """Sets a recipe's values over the shared ones; a ValueError for a bad one."""
    for name, value in config.items(preserve_field_references=True):
        key = f"{prefix}{name}"
        plain = value.get() if isinstance(value, FieldReference) else value
        if members := _members(f"{key}."):
            if not isinstance(plain, ConfigDict):
                raise ValueError(f"{key}={plain!r}: {key} is a group: {members}")
            _merge(values, plain, f"{key}.")
        elif key in SHARED:
            if key == "steps" and epochs_in(plain) is not None:
                value = plain = MOST_STEPS  # until the data are known: recipe.epochs
            if not SHARED[key].is_type_of(SHARED[key].cast(plain)):
                raise ValueError(f"{key}={plain!r}: must be {SHARED[key].possible()}")
            _set(values, key, value)
        elif prefix:  # a recipe has no keys of its own in a shared group
            hint = did_you_mean(key, SHARED) or f"; possible: {_members(prefix)}"
            raise ValueError(f"unknown key {key!r}{hint}")
        else:
            shared = {key.split(".")[0] for key in SHARED}
            if hint := did_you_mean(key, shared - set(config), cutoff=0.8):
                raise ValueError(f"unknown key {key!r}{hint}")
            values[name] = value


def _members(prefix: str) -> str:
    return ", ".join(key for key in SHARED if key.startswith(prefix))


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a shared key in nested dicts; a recipe's references stay references."""
    *groups, name = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    if not isinstance(value, FieldReference):
        value = SHARED[key].cast(value)
        if SHARED[key].also:
            value = FieldReference(value, field_type=object)
    values[name] = value


def declarations(config: ConfigDict, prefix: str = "") -> dict[str, Knob]:
    """Returns the declaration of every key of a completed config, by flattened name."""
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
        else:  # a plain value, checked for its type alone
            kind = config.get_type(name)
            kind = object if kind is type(None) else kind
            also = (None,) if kind is str else ()
            found[key] = Knob(config[name], "", kind=kind, also=also)
    return found


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Returns a config as `{"optimizer.learning_rate": 1e-3, ...}`."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict | dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_within(key: str, groups: Iterable[str]) -> bool:
    """Returns whether a flattened key is one of these or belongs to one of them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def check(config: ConfigDict) -> None:
    """Raises a UserError if keys are out of range or contradict each other."""
    flat = flatten(config)

    def refuse(key: str, problem: str) -> None:
        raise UserError(f"--config.{key}={flat[key]}: {problem}")

    for key, declared in declarations(config).items():
        check_value(f"config.{key}", flat[key], declared)
    if problem := profile_problem(config.profile.steps, config.steps):
        refuse("profile.steps", problem)
    if config.eval_tasks and not config.eval_every:
        refuse("eval_tasks", "needs --config.eval_every above 0")
    checkpoint = config.checkpoint
    if checkpoint.best:
        if not checkpoint.best.startswith("eval_"):
            refuse("checkpoint.best", "must be an evaluation metric, such as eval_loss")
        for key in ("eval_every", "checkpoint.every"):
            if not flat[key]:
                refuse("checkpoint.best", f"needs --config.{key} above 0")
    if checkpoint.load_best and not checkpoint.best:
        refuse("checkpoint.load_best", "needs --config.checkpoint.best")
    if checkpoint.local and not checkpoint.every:
        refuse("checkpoint.local", "needs --config.checkpoint.every above 0")
    if checkpoint.restore_optimizer:
        if not checkpoint.restore:
            problem = "from where? give --config.checkpoint.restore too"
            refuse("checkpoint.restore_optimizer", problem)
        if checkpoint.restore.endswith(".safetensors"):
            problem = f"{checkpoint.restore} has parameters only"
            refuse("checkpoint.restore_optimizer", problem)
    for entry in map(str, checkpoint.accept):
        if entry not in MEANING and not any(is_within(key, [entry]) for key in flat):
            raise UserError(
                f"--config.checkpoint.accept={entry}: the recipe has no such key or "
                f"group{did_you_mean(entry, flat)}"
            )
