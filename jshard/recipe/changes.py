"""What changed between a run and the command that resumes it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard.recipe.config.run_config import MEANING, flatten, is_within
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json

Changes = Mapping[str, tuple[Any, Any]]  # old and new value by flattened key


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


# The key of a run's `config.json` that says for which devices some keys were chosen.
FITTED_ON = "fitted_on"
NOTES = "notes.json"  # in a run's folder
ABSENT = _Absent()  # the value of a key that only the other config has


def read_config(workdir: Path) -> dict[str, Any]:
    """Reads the config of the run in a folder, for `changed_keys`."""
    return read_object(workdir / "config.json")


def read_notes(workdir: Path) -> dict[str, Any]:
    """Reads the notes of the run in a folder; none if it has no file of them.

    Raises:
      UserError: It cannot be read, or what a run goes on from has another form.
    """
    path = workdir / NOTES
    if not path.exists():
        return {}
    notes = read_object(path)
    for name, is_one in _FORMS.items():
        if name in notes and not is_one(notes[name]):
            raise UserError(
                f"cannot resume: {name!r} in {path} is not as a run writes it: repair "
                "the file"
            )
    return notes


def _has_steps(values: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(is_one, values))


# What a run reads of its notes; the report leaves out what it cannot read.
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "run": lambda x: isinstance(x, str),
    "resumed": lambda x: _has_steps(x, lambda step: type(step) is int),
    "stopped": lambda x: not x or (isinstance(x, dict) and {*x} >= _STOPPED),
    "generated": lambda x: _has_steps(
        x, lambda one: isinstance(one, dict) and type(one.get("step")) is int
    ),
    "samples": lambda x: isinstance(x, dict),
    "loggers": lambda x: isinstance(x, dict),
}
_STOPPED = {"step", "steps", "why"}


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; a UserError if the file does not hold one."""
    try:
        value = read_json(path)
    except OSError as error:
        raise UserError(f"cannot resume: {path} cannot be read: {error}") from error
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"cannot resume: {path} does not hold a JSON object: repair it, or "
            "give another --workdir"
        )
    return value


def changed_keys(
    old: dict[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Compares a run's recorded config with the one that is to resume it.

    Returns:
      Old and new value by flattened key, both as JSON stores them, so that a tuple
      equals a list; `ABSENT` stands for no value. `checkpoint.accept`, the recipe's
      name and `FITTED_ON` are left out.
    """
    before = {key: value for key, value in flatten(old).items() if key != FITTED_ON}
    after = flatten(json.loads(json.dumps(new, default=str)))
    if "recipe" not in after:  # otherwise it is a key of the recipe's own
        before.pop("recipe", None)
    changes = {
        key: (before.get(key, ABSENT), after.get(key, ABSENT))
        for key in after | before
        if key != "checkpoint.accept"
    }
    return {
        key: (one, other)
        for key, (one, other) in changes.items()
        if one != other and repr(one) != repr(other)  # NaN is not equal to itself
    }


def check_changes(
    changes: Changes, accept: Iterable[str], obstacle: Callable[[], str] = lambda: ""
) -> None:
    """Refuses changes that would make the resumed run a different one.

    `accept` has the keys and groups that may change, and `obstacle` returns why a
    refused change cannot be accepted either, or "".

    Raises:
      UserError: Lists the changes of model, data, batch size and seed that are not
        accepted, and the flag that accepts them, if possible.
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
        remedy = f"it cannot be resumed with this one: {why}"
    else:
        # A key that no longer exists can only be named by its group.
        names = [
            key.split(".")[0] if now is ABSENT else key
            for key, (_, now) in refused.items()
        ]
        flag = ",".join(dict.fromkeys([*accept, *names]))
        remedy = f"to resume it anyway add --config.checkpoint.accept={flag}"
    raise UserError(
        f"the run in --workdir has another config: {_listed(refused)}; {remedy}; "
        "another --workdir starts a new run"
    )


def describe_changes(changes: Changes) -> str:
    """Returns one line for the user, or "" if nothing changed."""
    return f"config differs from the run's: {_listed(changes)}" if changes else ""


def _listed(changes: Changes) -> str:
    return ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in changes.items())
