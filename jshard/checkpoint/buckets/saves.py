"""Saves to a bucket, which has no renames and no locks.

Each attempt to save step 100 writes below a name of its own, ``100-1f2e3d4c/``, and
``steps.json`` names it when all is written. Whoever is killed at whatever moment leaves
objects that it does not name, which are deleted later.

The small files of each complete step are kept in a local folder as well (``mirror``).
Processes communicate through JAX's coordination service.
"""

import dataclasses
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.checkpoint import manifest, metadata, step_folders
from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.buckets import arrays
from jshard.checkpoint.buckets.mirror import fetch_steps
from jshard.checkpoint.buckets.objects import BucketError, Objects
from jshard.checkpoint.buckets.step_list import StepList
from jshard.distributed.key_value import KeyValueStore
from jshard.errors import UserError

_PATIENCE = 1200.0  # seconds to wait for other processes, as on a disk
Expired = Callable[[Mapping[int, Path], int], list[int]]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A save in progress: its name in the bucket, and this process's shards."""

    step: int
    name: str
    shards: arrays.Shards


class BucketSaves:
    """Saves steps below a URL; every process calls the same methods.

    Args:
      url: The folder of checkpoints in the bucket.
      local: The local folder with the small files of its steps.

    Raises:
      UserError: The bucket cannot be written.
    """

    def __init__(self, url: str, local: Path):
        self._objects, self._local = Objects(url), local
        self._leftovers: set[str] = set()
        self._last = ""
        problem = ""
        if jax.process_index() == 0:
            try:
                self._list = StepList(self._objects)
                fetch_steps(self._objects, local)
                found = {path.partition("/")[0] for path in self._objects.paths()}
                complete = self._list.names.values()
                self._delete({name for name in found if "-" in name} - {*complete})
            except BucketError as error:
                problem = f"cannot write checkpoints to {url}: {error.strerror}"
        if multihost_utils.broadcast_one_to_all(np.int32(bool(problem))):
            raise UserError(problem or f"process 0 cannot write checkpoints to {url}")

    def refresh(self) -> None:
        """Copies the small files of steps that this process has not seen yet."""
        fetch_steps(self._objects, self._local)

    def start(self, step: int, values: Mapping[str, jax.Array]) -> Attempt:
        """Copies this process's shards to the host."""
        token = np.frombuffer(secrets.token_bytes(4), np.uint32)
        (token,) = np.asarray(multihost_utils.broadcast_one_to_all(token)).tolist()
        if self._last and jax.process_count() > 1 and jax.process_index() == 0:
            KeyValueStore(self._last).clear()  # every process has ended that save
        self._last = f"{step}-{token:08x}"
        return Attempt(step, self._last, arrays.on_host(values))

    def complete(
        self,
        attempt: Attempt,
        content: Mapping[str, Any],
        texts: Mapping[str, str],
        expired: Expired,
    ) -> int:
        """Writes the shards, and on process 0 all the rest; returns its bytes.

        Args:
          attempt: From ``start``.
          content: The metadata.
          texts: Small files by name.
          expired: Chooses the steps to delete, given the local folder of each and the
            newest step.

        Raises:
          OSError: It failed, here or on another process.
        """
        process, count = jax.process_index(), jax.process_count()
        there = self._objects.below(attempt.name)
        try:
            if process == 0:
                self._list.check()
            arrays.write(there, attempt.shards, process, count)
            own = (x.nbytes for _, own in attempt.shards.values() for _, x in own)
            mine = {
                "objects": arrays.objects_of(there, process, count),
                "bytes": sum(own),
            }
            if process > 0:
                _tell(attempt.name, mine)
                return 0
            for theirs in _hear(attempt.name, count):
                mine["objects"] |= theirs["objects"]
                mine["bytes"] += theirs["bytes"]
            arrays.merge(there, count)
            mine["objects"] |= arrays.merged_objects(there, count)
            size = self._commit(attempt, content, texts, mine, expired)
        except BaseException as error:
            self._leftovers.add(attempt.name)
            _end(attempt.name, f"{error}"[:200] or type(error).__name__)
            raise
        _end(attempt.name, "")
        return size

    def _commit(
        self,
        attempt: Attempt,
        content: Mapping[str, Any],
        texts: Mapping[str, str],
        written: Mapping[str, Any],
        expired: Expired,
    ) -> int:
        """Writes the small files and the manifest, then the list of steps."""
        there = self._objects.below(attempt.name)
        built = self._local / f"{attempt.step}{step_folders.SAVING}"
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir(parents=True)
        metadata.write(built, content)
        for name, text in texts.items():
            replace_file(built / name, text)
        files: dict[str, Any] = {}
        for name in (metadata.FILE, *texts):
            files |= manifest.checksum(built, name)
        manifest.write(built, files, {"url": there.url, **written})
        for name in (*files, manifest.FILE):
            there.write(name, (built / name).read_bytes())
        replace_file(built / arrays.ADDRESS, there.url)

        def changed(names: Mapping[int, str]) -> dict[int, str]:
            folders = {s: step_folders.step_folder(self._local, s) for s in names}
            gone = expired(folders | {attempt.step: built}, attempt.step)
            new = {**names, attempt.step: attempt.name}
            return {step: name for step, name in new.items() if step not in gone}

        before, after = self._list.change(changed)
        step_folders.put_in_place(built)
        for step in before.keys() - after.keys():
            step_folders.delete(step_folders.step_folder(self._local, step))
        self._delete({*before.values()} - {*after.values()} | self._leftovers)
        return written["bytes"] + sum(file["bytes"] for file in files.values())

    def _delete(self, names: set[str]) -> None:
        """Deletes folders of steps; only warns on failure, and tries again later."""
        for name in sorted(names):
            try:
                self._objects.delete(f"{name}/")
                self._leftovers.discard(name)
            except BucketError as error:
                self._leftovers.add(name)
                logging.getLogger("jshard").warning("cannot delete: %s", error)

    def check_owner(self) -> None:
        """Raises ``Overtaken`` if a run that was started later saves here."""
        self._list.check()


# How processes hear of each other.


def _tell(attempt: str, mine: Mapping[str, Any]) -> None:
    """Tells process 0 what this process wrote, and waits for the end of the save."""
    store = KeyValueStore(attempt)
    store.put(f"{jax.process_index()}", json.dumps(mine))
    if problem := store.get("end", _PATIENCE):
        raise OSError(f"the save failed on another process: {problem}")


def _hear(attempt: str, count: int) -> list[dict[str, Any]]:
    """Waits for all other processes; returns what they wrote."""
    found = []
    for process in range(1, count):
        theirs = json.loads(KeyValueStore(attempt).get(f"{process}", _PATIENCE))
        if "error" in theirs:
            raise OSError(f"the save failed on process {process}: {theirs['error']}")
        found.append(theirs)
    return found


def _end(attempt: str, problem: str) -> None:
    """Tells the others that a save has succeeded or, with a problem, failed."""
    if jax.process_count() == 1:
        return
    store = KeyValueStore(attempt)
    if jax.process_index() == 0:
        store.put("end", problem)
    else:
        store.put(f"{jax.process_index()}", json.dumps({"error": problem}))
