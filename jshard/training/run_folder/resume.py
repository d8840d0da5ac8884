"""What changed between a run and the command that resumes it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard.errors import UserError
from jshard.training.config.config import MEANING, Config, flatten, is_within

Changes = Mapping[str, tuple[Any, Any]]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()  # the value of a key that only the other config has


def read_config(workdir: Path) -> dict[str, Any]:
    """Reads the config of the run in a folder, for `changed_keys`.

    Args:
      workdir: The run's folder.

    Returns:
      The config as JSON keeps it.

    Raises:
      UserError: There is none, or it is no JSON object.
    """
    path = workdir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot resume: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"cannot resume: {path} holds no config")
    return config


def changed_keys(old: dict[str, Any], new: Config) -> dict[str, tuple[Any, Any]]:
    """Compares a run's config with the one that is to resume it.

    Args:
      old: The run's config, from its `config.json`.
      new: The config now.

    Returns:
      Old and new value by flattened key, both as JSON keeps them, so that a tuple and
      a list are the same; `ABSENT` stands for no value. `checkpoint.accept` and the
      recipe's name are left out.
    """
    before, after = flatten(old), flatten(_as_json(new.to_dict()))
    if "recipe" not in after:  # else it is a key of the recipe's own
        before.pop("recipe", None)
    return {
        key: (before.get(key, ABSENT), after.get(key, ABSENT))
        for key in after | before
        if key != "checkpoint.accept" and not _equal(before, after, key)
    }


def check_changes(
    changes: Changes, accept: Iterable[str], obstacle: Callable[[], str] = lambda: ""
) -> None:
    """Refuses changes that would make the resumed run another one.

    Args:
      changes: What `changed_keys` returned.
      accept: The user's `checkpoint.accept`: keys and groups that may change.
      obstacle: Called where a change is refused: why it cannot be accepted either; ""
        where it can.

    Raises:
      UserError: Lists the changes of model, data, batch size and seed that are not
        accepted, and the flag that accepts them if that can be.
    """
    accept = tuple(accept)
    refused = {
        key: change
        for key, change in changes.items()
        if is_within(key, MEANING) and not is_within(key, accept)
    }
    if not refused:
        return
    if why := obstacle():
        raise UserError(
            f"the run in --workdir has another config: {_listed(refused)}; it cannot "
            f"go on with this one: {why}; another --workdir starts anew"
        )
    # A key that is no more can only be named by its group.
    names = [
        key.split(".")[0] if now is ABSENT else key for key, (_, now) in refused.items()
    ]
    flag = ",".join(dict.fromkeys([*accept, *names]))
    raise UserError(
        f"the run in --workdir has another config: {_listed(refused)}; to go on all "
        f"the same add --config.checkpoint.accept={flag}; another --workdir starts anew"
    )


def describe_changes(changes: Changes) -> str:
    """Returns one line that tells the user of changes, or "" when there are none."""
    return f"config differs from the run's: {_listed(changes)}" if changes else ""


def _listed(changes: Changes) -> str:
    return ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in changes.items())


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _equal(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    if key not in before or key not in after:
        return False
    # By their text too: NaN is not equal to itself.
    old, new = before[key], after[key]
    return old == new or json.dumps(old) == json.dumps(new)
