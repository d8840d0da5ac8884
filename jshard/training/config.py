"""The config of a run: the keys that every recipe shares."""

import difflib
from collections.abc import Iterable
from typing import Any, TypeAlias

from ml_collections import ConfigDict, FieldReference

from jshard.errors import UserError

# An ml_collections.ConfigDict; type checkers cannot know its keys.
Config: TypeAlias = Any

# Keys that every recipe has; a recipe that does not name one gets this default.
SHARED_DEFAULTS = {
    "seed": 0,
    "log_every": 10,
    "eval_every": 0,  # 0 is never
    "eval_batches": 0,  # at most so many; 0 is all of the validation data
    "mesh": {
        "fsdp": -1,  # shards of a parameter; -1 is all devices that replica leaves
        "replica": 1,  # copies of the sharded model, or "hosts": one a host
        "cpu_devices": 8,  # of each process, where there are no others
    },
    "policy": {
        "remat": "full",  # or dots, none, names:A+B, offload:A+B
        "first_k": None,  # layers of a Stack that remat applies to; None is all
        "reshard_after_forward": True,  # or False, or a group of so many devices
        "keep_last": 0,  # last layers of a Stack that keep their gathered weights
        "prefetch": None,  # transfers beside the neighbouring layer; None is on GPUs
        "reshard_root": False,
        "accumulate": 1,
        "defer_scatter": False,
        "loss_scale": False,
        "min_shard_elements": 4096,
        "ema_decay": None,  # None is no averages
        "offload": None,  # to host memory: optimizer, or all (parameters, too)
        "precision": {
            "param": None,
            "gather": None,
            "compute": None,
            "reduce": None,
            "sum": None,
        },
        "overrides": (),  # PATTERN:KEY=VALUE, e.g. blocks.norm*:compute=float32
    },
    "compiler_options": (),  # NAME=VALUE, over those of jshard/compiler.py
    "checkpoint": {
        "every": 500,  # steps; 0 never saves
        "keep": 3,  # the newest so many
        "keep_every": 0,  # and every step that this divides; 0 is none
        "best": "",  # and the best by this metric of evaluations, e.g. "eval_loss"
        "best_is": "lowest",  # or "highest"
        # Start from another run's parameters: its folder, a step's, or safetensors.
        "restore": "",
        "restore_optimizer": False,  # and from its optimizer state
        "accept": (),  # keys, or groups, that may differ from the run that is resumed
    },
    "watch": {  # over the processes of a job, where there are several
        "silence": 8.0,  # seconds without a sign of life of one, and all end
        # Seconds in which none gets on, and all end; 0 is never, and auto learns from
        # the run: a minute, or ten steps.
        "stuck": "auto",
    },
}
REQUIRED_KEYS = ("steps", "batch_size")

# Keys that take values of several types: a number, a boolean, a name.
ANY_TYPE = (
    "policy.reshard_after_forward",
    "policy.reshard_root",
    "mesh.replica",
    "watch.stuck",
)

# Keys and groups that say what is trained, and on which data in which order: a run
# that goes on with others is another run.
MEANING = ("model", "data", "batch_size", "seed")

MINIMA = {
    "steps": 1,
    "batch_size": 1,
    "seed": 0,
    "log_every": 1,
    "eval_every": 0,
    "eval_batches": 0,
    "mesh.cpu_devices": 1,
    "policy.accumulate": 1,
    "policy.keep_last": 0,
    "policy.min_shard_elements": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "watch.silence": 2,
}
MAXIMA = {"watch.silence": 60}  # JAX itself gives up after 100 seconds


def complete(config: Config, recipe: str) -> Config:
    """Adds the shared keys that a recipe leaves at their defaults.

    Args:
      config: What the recipe's `get_config` returned.
      recipe: The recipe's name, for messages.

    Returns:
      A config with every shared key.

    Raises:
      UserError: The config is no `ConfigDict` or lacks a required key.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"get_config() of recipe {recipe} returns {type(config).__name__}; "
            "it must return an ml_collections.ConfigDict"
        )
    for key in REQUIRED_KEYS:
        if key not in config:
            raise UserError(f"get_config() of recipe {recipe} lacks the key {key!r}")
    completed: Config = ConfigDict(SHARED_DEFAULTS)
    for key in ANY_TYPE:
        group, name = key.split(".")
        default = FieldReference(completed[group][name], field_type=object)
        with completed.ignore_type():
            completed[group][name] = default
    try:
        completed.update(config)
    except TypeError as error:
        raise UserError(f"get_config() of recipe {recipe}: {error}") from error
    return completed.lock()


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


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean X?" for the most similar name, or ""."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def check(config: Config) -> None:
    """Raises a UserError for shared keys that are out of range or at odds."""
    flat = flatten(config)
    for key, minimum in MINIMA.items():
        if flat[key] < minimum:
            raise UserError(f"--config.{key}={flat[key]}: must be at least {minimum}")
    for key, maximum in MAXIMA.items():
        if flat[key] > maximum:
            raise UserError(f"--config.{key}={flat[key]}: must be at most {maximum}")
    stuck = config.watch.stuck
    if stuck != "auto" and not (type(stuck) in (int, float) and stuck >= 0):
        raise UserError(
            f"--config.watch.stuck={stuck}: must be auto, or seconds from 0 (never)"
        )
    _check_best(config)
    _check_restore(config.checkpoint)
    for entry in map(str, config.checkpoint.accept):
        if entry not in MEANING and not any(is_within(key, [entry]) for key in flat):
            raise UserError(
                f"--config.checkpoint.accept={entry}: the recipe has no such key or "
                f"group{nearest(entry, flat)}"
            )


def _check_best(config: Config) -> None:
    best, best_is = config.checkpoint.best, config.checkpoint.best_is
    if best_is not in ("lowest", "highest"):
        raise UserError(
            f"--config.checkpoint.best_is={best_is}: must be lowest or highest"
        )
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
