"""The config of a run: the keys that every recipe shares."""

from typing import Any, TypeAlias

from ml_collections import ConfigDict

from jshard.errors import UserError

# An ml_collections.ConfigDict; type checkers cannot know its keys.
Config: TypeAlias = Any

# Keys that every recipe has; a recipe that does not name one gets this default.
SHARED_DEFAULTS = {
    "seed": 0,
    "log_every": 10,
    "eval_every": 0,  # 0 is never
    "eval_batches": 0,  # at most so many; 0 is all of the validation data
    "mesh": {"fsdp": -1, "replica": 1, "cpu_devices": 8},
    "policy": {
        "remat": "full",
        "reshard_after_forward": True,
        "accumulate": 1,
        "min_shard_elements": 4096,
        "precision": {"param": None, "gather": None, "compute": None, "reduce": None},
    },
}
REQUIRED_KEYS = ("steps", "batch_size")

MINIMA = {
    "steps": 1,
    "batch_size": 1,
    "seed": 0,
    "log_every": 1,
    "eval_every": 0,
    "eval_batches": 0,
    "mesh.cpu_devices": 1,
    "policy.accumulate": 1,
    "policy.min_shard_elements": 0,
}


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


def check(config: Config) -> None:
    """Raises a UserError for a shared key that is out of range."""
    flat = flatten(config)
    for key, minimum in MINIMA.items():
        if flat[key] < minimum:
            raise UserError(f"--config.{key}={flat[key]}: must be at least {minimum}")
