"""Saves to a folder on a disk that all hosts share.

A step's folder is built under another name, ``100.saving``. In it Orbax writes the
arrays, each process its shards; then metadata is written, then the manifest with a
checksum of every file; finally the folder is renamed (``step_folders``). Whenever a
process dies, a folder whose name is a number was complete at some time, and the
manifest shows whether it still is.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
from flax.traverse_util import unflatten_dict

from jshard.storage.checkpoint import manifest, metadata, step_folders
from jshard.storage.checkpoint.participants import Participants, on_first
from jshard.storage.checkpoint.step_folders import SAVING, find_steps, step_folder
from jshard.storage.checkpoint.stored_arrays import ARRAYS, start_saving
from jshard.system.compat import orbax
from jshard.system.files.atomic import replace_file

# Chooses the steps to delete, given the folder of each complete one and the newest.
Expired: TypeAlias = Callable[[Mapping[int, Path], int], list[int]]


class DiskSaves:
    """Saves steps to a folder; every process calls the same methods.

    Args:
      folder: Created if it does not exist.

    Raises:
      OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._built = folder  # that of the save in progress, or of the last one
        orbax.silence()
        on_first(self._tidy)

    def start(
        self, step: int, arrays: Mapping[str, Any], described: Mapping[str, Any]
    ) -> Any:
        """Starts to write arrays, given what the metadata says of each, by name."""
        self._built = self._folder / f"{step}{SAVING}"

        def make() -> None:  # if Orbax failed to, other processes would wait minutes
            self._tidy()
            self._built.mkdir()

        on_first(make)
        return start_saving(self._built, unflatten_dict(arrays, sep="."), described)

    def write(self, started: Any, group: Participants) -> dict[str, Any]:
        """Waits until the arrays are written; returns checksums of a share of files."""
        group.wait_for(started)
        return manifest.checksum(self._built, ARRAYS, group.index, group.count)

    def commit(
        self,
        content: Mapping[str, Any],
        texts: Mapping[str, str],
        parts: list[Mapping[str, Any]],
        expired: Expired,
    ) -> int:
        """Completes a checkpoint whose arrays are written; returns its bytes.

        Args:
          content: The metadata.
          texts: Small files by name.
          parts: What ``write`` returned on each process.
          expired: Chooses the steps to delete.
        """
        files = write_texts(self._built, content, texts)
        for part in parts:
            files |= part
        manifest.write(self._built, files)
        step_folders.put_in_place(self._built)
        steps = find_steps(self._folder)
        folders = {step: step_folder(self._folder, step) for step in steps}
        for step in expired(folders, content["step"]):
            step_folders.delete(folders[step])
        return sum(file["bytes"] for file in files.values())

    def give_up(self) -> None:
        """Removes the save in progress, which has failed."""
        if jax.process_index() == 0:
            step_folders.give_up(self._built)

    def _tidy(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        step_folders.tidy(self._folder)


def write_texts(
    folder: Path, content: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Writes the metadata and the small files of a step; returns their checksums."""
    metadata.write(folder, content)
    for name, text in texts.items():
        replace_file(folder / name, text)
    files: dict[str, Any] = {}
    for name in (metadata.FILE, *texts):
        files |= manifest.checksum(folder, name)
    return files
