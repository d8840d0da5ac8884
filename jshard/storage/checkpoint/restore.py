"""Finds, verifies and reads checkpoints."""

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import frozen, manifest, metadata, spike_memory
from jshard.storage.checkpoint.buckets import arrays as bucket
from jshard.storage.checkpoint.orbax.folder import check_not_orbax, is_orbax
from jshard.storage.checkpoint.step_folders import (
    CHECKPOINTS,
    REPLACED,
    find_steps,
    step_folder,
)
from jshard.storage.checkpoint.stored_arrays import ARRAYS, load_checked
from jshard.system.errors import UserError, some_of, warn

PATIENCE = 30.0  # seconds, for network file systems that cache missing files


# Finding.


def is_step(path: Path) -> bool:
    """Returns whether ``path`` is a step's folder, possibly damaged."""
    has_arrays = (path / ARRAYS).is_dir() and not is_orbax(path)
    return (path / manifest.FILE).exists() or has_arrays


def find_step(path: Path) -> Path:
    """Finds and verifies the checkpoint that a path refers to; returns its folder.

    Args:
      path: A step's folder; or a folder of checkpoints or a run's folder, for its
        newest intact checkpoint.

    Raises:
      UserError: There is no checkpoint, or none is intact.
    """
    if is_step(path):
        if damage := find_damage(path):
            raise UserError(f"checkpoint {bucket.shown(path)} is damaged: {damage}")
        return path
    return newest_intact(checkpoints_folder(path))


def checkpoints_folder(path: Path) -> Path:
    """Returns the folder of checkpoints that ``path`` is, or that it has as a run.

    Raises:
      UserError: It contains no checkpoint, or one of Orbax's.
    """
    folders = (path, path / CHECKPOINTS)
    for folder in folders:
        if find_steps(folder):
            check_not_orbax(folder)
            return folder
    for folder in folders:
        check_not_orbax(folder)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    raise UserError(f"{path} holds no checkpoint")


def newest_intact(folder: Path) -> Path:
    """Like ``find_newest``, but raises UserError if there are no checkpoints."""
    newest = find_newest(folder)
    if newest is None:
        raise UserError(f"no checkpoint in {folder}")
    return newest


def find_newest(folder: Path) -> Path | None:
    """Finds the newest intact checkpoint in a folder; warns about damaged newer ones.

    Process 0 lists the checkpoints, and all processes verify them together.

    Returns:
      The step's folder, the same on every process; None if there are no checkpoints.

    Raises:
      UserError: All are damaged, a newer jshard wrote the newest, a process cannot
        see it, or Orbax keeps checkpoints there.
    """
    check_not_orbax(folder)
    damaged = []
    for path in _steps_on_first(folder)[::-1]:
        step = int(path.stem)  # without ".replaced"
        if jax.process_count() > 1:
            wait_until_seen(path)
        damage = find_damage(path)
        if not damage:
            if damaged:
                warn(f"{'; '.join(damaged)} (in {folder}): step {step} is used instead")
            return path
        damaged.append(f"step {step} is damaged: {damage}")
    if damaged:
        raise UserError(
            f"no checkpoint in {folder} can be used: {'; '.join(damaged)}; to start "
            "from step 1, give another --workdir"
        )
    return None


def _steps_on_first(folder: Path) -> list[Path]:
    """Returns the folders of the newest 64 steps that process 0 sees.

    A network file system may show a new one later to other processes.
    """
    steps = np.full((64, 2), -1, np.int32)  # the step, and whether it is .replaced
    for i, step in enumerate(find_steps(folder)[-len(steps) :]):
        steps[i] = step, step_folder(folder, step).suffix == REPLACED
    steps = np.asarray(multihost_utils.broadcast_one_to_all(steps))
    return [
        folder / f"{step}{REPLACED * is_replaced}"
        for step, is_replaced in steps.tolist()
        if step >= 0
    ]


def find_damage(folder: Path) -> str:
    """Verifies a step; each process reads its share of the files.

    Returns:
      What is damaged, for all processes to know; empty if the checkpoint is intact.

    Raises:
      UserError: A newer jshard wrote it.
    """
    process, count = jax.process_index(), jax.process_count()
    problems = manifest.verify(folder, process, count)
    problems = problems or bucket.find_damage(folder, process, count)
    if count > 1:
        everywhere = multihost_utils.process_allgather(np.int32(len(problems)))
        if not problems and everywhere.any():
            problems = [f"process {everywhere.argmax()} found damaged files"]
    return some_of(problems, limit=3)


def wait_until_seen(folder: Path) -> None:
    """Waits until all processes see a step, or raises UserError on all of them."""
    file = folder / manifest.FILE
    deadline = time.monotonic() + PATIENCE
    if not multihost_utils.broadcast_one_to_all(np.int32(file.exists())):
        return  # it is damaged, for all processes
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everywhere = multihost_utils.process_allgather(np.int32(seen))
    if not everywhere.all():
        raise UserError(
            f"process {everywhere.argmin()} does not see checkpoint {folder}, which "
            "process 0 starts from: checkpoints need a file system that all hosts share"
        )


# Reading.


def restore_state(folder: Path, state: TrainState) -> TrainState:
    """Reads a complete state from a verified step.

    Args:
      folder: The step's folder.
      state: The state to create, abstract and on any mesh. Names and shapes must match
        the checkpoint's; floating-point dtypes and memory kinds may differ, and so may
        what ``skip_spikes`` remembers. If the checkpoint leaves out the frozen
        parameters, they must be arrays already.

    Raises:
      UserError: The checkpoint is of another model or optimizer; the message lists the
        first differences. Or frozen parameters are missing, or not those that the
        others were trained beside.
    """
    check_fits(folder, state)
    about, abstract = metadata.read(folder), state
    state, _, said = spike_memory.as_saved(abstract, about["arrays"])
    if said:
        shown = bucket.shown(folder)
        warn(f"checkpoint {shown} {said}: only what both remember is read")
    return spike_memory.as_wanted(_restore(folder, about, state), abstract)


def _restore(folder: Path, about: dict[str, Any], state: TrainState) -> TrainState:
    arrays = metadata.arrays_by_name(state)
    if frozen.KEY not in about:
        loaded = load_checked(folder, arrays, about["arrays"])
        return metadata.replace_arrays(state, loaded)
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(state.frozen)):
        raise UserError(
            f"checkpoint {folder} has the trained parameters alone: read the frozen "
            f"ones from {about[frozen.KEY]['path']} before it"
        )
    arrays = {name: x for name, x in arrays.items() if not frozen.is_frozen(name)}
    loaded = load_checked(folder, arrays, about["arrays"])
    state = metadata.replace_arrays(state, loaded)
    frozen.check_unchanged(folder, about, state)
    return state


def check_fits(folder: Path, state: TrainState) -> None:
    """Raises what ``restore_state`` raises for a checkpoint of another model."""
    about = metadata.read(folder)
    state, arrays, _ = spike_memory.as_saved(state, about["arrays"])
    wanted = metadata.exact_by_name(state)
    if frozen.KEY in about:
        wanted = {name: x for name, x in wanted.items() if not frozen.is_frozen(name)}
    metadata.check_wanted(folder, wanted, arrays)
