"""Saves of several processes, one of them in trouble, and what is left of them."""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from checkpoints import make_fsdp
from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.step_folders import find_steps
from known_states import (
    abstract,
    check_whole,
    make_state,
    restore_step,
)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """As far as other processes' files can fill it."""
    if jax.process_index() == 0:
        free = shutil.disk_usage(folder).free
        (folder / "other").write_bytes(bytes(free - 20_000))
    multihost_utils.sync_global_devices("full")
    yield
    multihost_utils.sync_global_devices("saved")
    if jax.process_index() == 0:
        (folder / "other").unlink()


@contextlib.contextmanager
def no_large_files(process: int) -> Iterator[None]:
    """One process cannot write files above a kilobyte; the others can."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == process:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def no_manifest() -> Iterator[None]:
    """The first process cannot write what makes a checkpoint of files."""
    with mock.patch.object(manifest, "write", side_effect=OSError(5, "I/O error")):
        yield


def save_in_trouble(folder: Path, trouble: Any, *args: Any) -> list[Save]:
    """Saves three steps, the second in trouble, and steps all the while."""
    fsdp = make_fsdp()
    x = fsdp.shard_batch(np.ones(8 // jax.process_count(), np.float32))
    step = jax.jit(lambda x: x / jnp.sum(x))  # waits for the other process
    reports: list[Save] = []

    def save_and_step(number: int) -> None:
        nonlocal x
        checkpointer.save(make_state(abstract(), number))
        for _ in range(8):
            x = step(x).block_until_ready()
        checkpointer.wait()
        x = step(x).block_until_ready()

    with Checkpointer(folder / "checkpoints", report=reports.append) as checkpointer:
        save_and_step(1)
        with trouble(*args):
            save_and_step(2)
        save_and_step(3)
    return reports


def check_trouble(results: list[list[Save]], folder: Path, why: str) -> None:
    for reports in results:
        assert [save.step for save in reports] == [1, 2, 3]
        assert [bool(save.error) for save in reports] == [False, True, False]
        assert reports[1].took < 20  # not Orbax's 20 minutes
        assert "\n" not in reports[1].error
    assert any(why in reports[1].error for reports in results)
    assert find_steps(folder / "checkpoints") == [1, 3]
    for step in ("1", "3"):
        check_whole(folder / "checkpoints" / step)
    assert restore_step(folder / "checkpoints", (1, 8)) == 3
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["1", "3"]
