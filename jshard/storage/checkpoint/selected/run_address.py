"""The address of a run, with the checkpoint that is meant: RUN, RUN@best, RUN@5.

What exists under the whole name comes first, so that a folder may be called "a@best".
"""

import re
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.storage.checkpoint.buckets.mirror import holds_checkpoints, on_disk
from jshard.storage.checkpoint.restore import (
    checkpoints_folder,
    is_step,
    wait_until_seen,
)
from jshard.storage.checkpoint.selected.best_step import require_best
from jshard.storage.checkpoint.step_folders import CHECKPOINTS, find_steps, step_folder
from jshard.system.cli.paths import is_bucket, is_remote
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

BEST, NEWEST = "best", "newest"
_AT = re.compile(r"(?P<run>.+)@(?P<step>[^@/]*)/*", re.DOTALL)
_STEP = re.compile(rf"{BEST}|{NEWEST}|[0-9]{{1,10}}")


class Address(NamedTuple):
    """A run, or one checkpoint, and which step of it: best, newest or a number."""

    run: str
    step: str = NEWEST


def find_run(given: str | Path, step: str | int | None = None) -> Path:
    """Returns the local folder of a run, or of that checkpoint of it that is meant.

    All processes call it; process 0 chooses the step.

    Args:
      given: A run's folder, a folder of checkpoints, one checkpoint, any other folder,
        or a URL in a bucket. After a run may stand @best, @newest or @STEP.
      step: The same, as `--step` gives it.

    Returns:
      The folder, or the local copy of what is small in a bucket; for the newest step
      the run's own.

    Raises:
      UserError: There is no such checkpoint, or the step is given twice.
    """
    address = parse_address(given, step)
    path = on_disk(address.run)
    return path if address.step == NEWEST else _selected(path, address)


def parse_address(given: str | Path, step: str | int | None = None) -> Address:
    """Returns a run's address in parts; the arguments are those of `find_run`.

    Raises:
      UserError: The step is none, or given twice.
    """
    text = str(given)
    if names_step(text):
        match = _AT.fullmatch(text)
        assert match is not None
        if step is not None:
            raise UserError(f"{text} names a step: leave out --step={step}")
        return Address(match["run"], _checked(match["step"], text))
    if step is None:
        return Address(text)
    return Address(text, _checked(str(step), f"--step={step}"))


def names_step(text: str) -> bool:
    """Returns whether an address ends in @STEP, and is no name of a file or folder."""
    match = _AT.fullmatch(text)
    if match is None or (is_remote(text) and not is_bucket(text)):
        return False
    run, is_valid = match["run"], _STEP.fullmatch(match["step"]) is not None
    if is_bucket(text):
        return holds_checkpoints(run) and not holds_checkpoints(text)
    whole, folder = Path(text).expanduser(), Path(run).expanduser()
    # ORG/NAME@main is on the Hugging Face Hub, unless a run has that name here.
    return not whole.exists() and folder.exists() and (is_valid or _is_run(folder))


def _is_run(folder: Path) -> bool:
    own = (folder, folder / CHECKPOINTS)
    return is_step(folder) or any(find_steps(one) for one in own)


def _checked(step: str, given: str) -> str:
    if not _STEP.fullmatch(step):
        raise UserError(
            f"{given}: a step of a run is {BEST}, {NEWEST} or a number"
            f"{did_you_mean(step, (BEST, NEWEST))}"
        )
    return step


def _selected(path: Path, address: Address) -> Path:
    """Returns the folder of the step that process 0 chooses."""
    step, problem = -1, UserError(f"process 0 has no {address.run}@{address.step}")
    if jax.process_index() == 0:
        try:
            step = _step(path, address)
        except UserError as error:
            problem = error
    several = jax.process_count() > 1
    if several:
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    if step < 0:
        raise problem
    folder = step_folder(checkpoints_folder(path), step)
    if several:
        wait_until_seen(folder)
    return folder


def _step(path: Path, address: Address) -> int:
    """Returns the number of the step that is meant."""
    if is_step(path):
        raise UserError(
            f"{address.run} is one checkpoint, which has no other steps: give its "
            f"run's folder with @{address.step}"
        )
    folder = checkpoints_folder(path)
    if address.step == BEST:
        return require_best(folder, address.run).step
    steps, step = find_steps(folder), int(address.step)
    if step not in steps:
        raise UserError(
            f"{address.run} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, steps))}"
        )
    return step
