"""States whose values follow from the names of their arrays.

So every process can make its shards, and compare them, by itself.
"""

import functools
import os
import pkgutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jshard
from checkpoints import OPTIMIZER, Model, expected, make_fsdp, make_state, padded
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.checkpoint.step_folders import find_steps

FILES = {"description.json", "manifest.json", "state"}


@functools.cache
def abstract(replica: int = 1, fsdp: int = 8) -> jshard.TrainState:
    return make_fsdp(replica, fsdp).abstract_state(Model, OPTIMIZER)


def check_state(state: jshard.TrainState, step: int) -> None:
    """Compares this process's shards bit for bit."""
    exact = metadata.exact_by_name(state)
    for name, array in metadata.arrays_by_name(state).items():
        full = padded(expected(name, exact[name], step), array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        assert (array.shape, array.dtype) == (full.shape, full.dtype), name
        for shard in array.addressable_shards:
            got = np.asarray(shard.data)
            np.testing.assert_array_equal(got, full[shard.index], err_msg=name)


def save_steps(folder: Path, mesh: tuple[int, int], *steps: int) -> list[Save]:
    reports: list[Save] = []
    with Checkpointer(folder, keep=9, report=reports.append) as checkpointer:
        for step in steps:
            checkpointer.save(make_state(abstract(*mesh), step))
    assert find_steps(folder) == sorted(steps)  # on every process at once
    return reports


def restore_step(folder: Path, mesh: tuple[int, int], step: int | None = None) -> int:
    """Restores and compares a step; returns which."""
    state = Checkpointer(folder).restore(abstract(*mesh), step)
    check_state(state, int(state.step))
    return int(state.step)


def check_whole(folder: Path) -> None:
    """A step's folder holds what its manifest lists, and that alone."""
    assert not find_damage(folder)
    assert {path.name for path in folder.iterdir()} == FILES
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == manifest.read(folder).keys() | {manifest.FILE}


def save_and_die(folder: Path, victim: int, moment: str) -> None:
    """Saves step 1, and dies in the save of step 2: at a function, by its name."""
    state = make_state(abstract(1, 2))
    checkpointer = Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()

    def die(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if jax.process_index() == victim and moment != "while arrays are written":
        place, function = moment.rsplit(".", 1)
        setattr(pkgutil.resolve_name(place), function, die)
    checkpointer.save(make_state(abstract(1, 2), 2))
    if jax.process_index() == victim and moment == "while arrays are written":
        die()
    checkpointer.wait()
