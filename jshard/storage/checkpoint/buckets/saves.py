"""Saves to a bucket, which has no renames and no locks.

Each attempt to save step 100 writes below a name of its own, ``100-1f2e3d4c/``, and
``steps.json`` names it when all is written. Whoever is killed at whatever moment leaves
objects that it does not name, which are deleted later.

The small files of each complete step are kept in a local folder as well (``mirror``).
"""

import logging
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jshard.storage.checkpoint import manifest, step_folders
from jshard.storage.checkpoint.buckets import arrays
from jshard.storage.checkpoint.buckets.mirror import fetch_steps
from jshard.storage.checkpoint.buckets.objects import BucketError, Objects
from jshard.storage.checkpoint.buckets.step_list import StepList, attempts
from jshard.storage.checkpoint.disk_saves import Expired, write_texts
from jshard.storage.checkpoint.participants import Participants, on_first
from jshard.system.files.atomic import replace_file


class BucketSaves:
    """Saves steps below a URL, with the methods of ``DiskSaves``.

    Args:
      url: The folder of checkpoints in the bucket.
      local: The local folder with the small files of its steps.
      owner: Who owns the list of steps already; by default this becomes its owner.

    Raises:
      OSError: The bucket cannot be written.
    """

    def __init__(self, url: str, local: Path, owner: str = ""):
        self._objects, self._local, self._owner = Objects(url), local, owner
        self._leftovers: set[str] = set()
        self._attempt = ""  # the name of the save in progress, or of the last one
        on_first(self._begin)

    def _begin(self) -> None:
        """Is the owner of the list of steps, and deletes what it does not name."""
        self._list = StepList(self._objects, self._owner)
        self.refresh()
        complete = self._list.names.values()
        self._delete({*attempts(self._objects)} - {*complete})

    def refresh(self) -> None:
        """Copies the small files of steps that this process has not seen yet."""
        fetch_steps(self._objects, self._local)

    def start(
        self, step: int, values: Mapping[str, Any], described: Mapping[str, Any]
    ) -> arrays.Shards:
        """Copies this process's shards to the host."""
        token = np.frombuffer(secrets.token_bytes(4), np.uint32)
        (token,) = np.asarray(multihost_utils.broadcast_one_to_all(token)).tolist()
        self._attempt = f"{step}-{token:08x}"
        return arrays.on_host(values)

    def write(self, started: arrays.Shards, group: Participants) -> dict[str, Any]:
        """Writes the shards; returns the generations of their objects, and bytes."""
        there = self._objects.below(self._attempt)
        if group.index == 0:
            self._list.check()
        arrays.write(there, started, group.index, group.count)
        sizes = (values.nbytes for _, own in started.values() for _, values in own)
        objects = arrays.objects_of(there, group.index, group.count)
        return {"objects": objects, "bytes": sum(sizes)}

    def commit(
        self,
        content: Mapping[str, Any],
        texts: Mapping[str, str],
        parts: list[Mapping[str, Any]],
        expired: Expired,
    ) -> int:
        """Writes the small files and the manifest, then the list of steps."""
        step, there = content["step"], self._objects.below(self._attempt)
        arrays.merge(there, len(parts))
        objects = arrays.merged_objects(there, len(parts))
        for part in parts:
            objects |= part["objects"]
        size = sum(part["bytes"] for part in parts)
        built = self._local / f"{step}{step_folders.SAVING}"
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir(parents=True)
        files = write_texts(built, content, texts)
        written = {"url": there.url, "objects": objects, "bytes": size}
        manifest.write(built, files, written)
        for name in (*files, manifest.FILE):
            there.write(name, (built / name).read_bytes())
        replace_file(built / arrays.ADDRESS, there.url)

        def changed(names: Mapping[int, str]) -> dict[int, str]:
            folders = {s: step_folders.step_folder(self._local, s) for s in names}
            gone = expired(folders | {step: built}, step)
            new = {**names, step: self._attempt}
            return {step: name for step, name in new.items() if step not in gone}

        before, after = self._list.change(changed)
        step_folders.put_in_place(built)
        for old in before.keys() - after.keys():
            step_folders.delete(step_folders.step_folder(self._local, old))
        self._delete(({*before.values()} | self._leftovers) - {*after.values()})
        return size + sum(file["bytes"] for file in files.values())

    def give_up(self) -> None:
        """Leaves the save in progress, which has failed, for the next to delete."""
        self._leftovers.add(self._attempt)

    def _delete(self, names: set[str]) -> None:
        """Deletes folders of steps; only warns on failure, and tries again later."""
        for name in sorted(names):
            try:
                self._objects.delete(f"{name}/")
                self._leftovers.discard(name)
            except BucketError as error:
                self._leftovers.add(name)
                logging.getLogger("jshard").warning("cannot delete: %s", error)
