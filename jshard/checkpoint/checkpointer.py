"""Checkpoints: asynchronous sharded saves, verified restores onto any mesh.

A step's folder is built under another name, ``100.saving``. In it Orbax writes the
arrays, each process its shards; then metadata is written, then the manifest with a
checksum of every file; finally the folder is renamed (``step_folders``). Whenever a
process dies, a folder whose name is a number was complete at some time, and the
manifest shows whether it still is.

Processes communicate through that folder. Each writes the checksums of its share of the
files for process 0, which does the rest. How they learn that one of them has failed is
in ``save_failures``.
"""

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jshard.checkpoint import frozen, manifest, metadata, step_folders
from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.buckets.arrays import address
from jshard.checkpoint.buckets.mirror import temporary_folder
from jshard.checkpoint.buckets.objects import Overtaken
from jshard.checkpoint.buckets.saves import BucketSaves
from jshard.checkpoint.restore import find_damage, newest_intact, restore_state
from jshard.checkpoint.save_failures import (
    FAILED_ELSEWHERE,
    give_up,
    on_first,
    wait_for_arrays,
    wait_until,
    why,
)
from jshard.checkpoint.step_folders import SAVING, SOUND, find_steps, step_folder
from jshard.checkpoint.stored_arrays import ARRAYS, start_saving
from jshard.cli.paths import check_path, is_bucket
from jshard.compat import orbax
from jshard.errors import UserError
from jshard.fsdp.state import TrainState, check_kept

_SHARE = ".part-{}.json"  # a file in the folder of a save: one process's checksums


@dataclasses.dataclass(frozen=True)
class Save:
    """The outcome of a save.

    Attributes:
      step: The step that was saved.
      blocked: Seconds that ``save`` blocked its caller after the state was computed.
      took: Seconds until the checkpoint was complete.
      size: Its bytes.
      error: Why the save failed, on one line; empty if it succeeded.
      overtaken: Whether it failed because a run that was started later saves there.
    """

    step: int
    blocked: float
    took: float
    size: int = 0
    error: str = ""
    overtaken: bool = False


def log(save: Save) -> None:
    """Logs the outcome of a save; errors reach stderr by default."""
    logger = logging.getLogger("jshard")
    if save.error:
        logger.error("checkpoint of step %d failed: %s", save.step, save.error)
    else:
        logger.info("checkpoint of step %d saved in %.1f s", save.step, save.took)


class Checkpointer:
    """Saves states to a folder and restores them.

    Every process must call every method, at the same steps, with a folder on a shared
    file system. When a save fails on one process, a thread of another may wait in Orbax
    for up to 20 minutes; ``jax.distributed.shutdown()`` at exit ends that wait.

    Args:
      folder: Created if it does not exist; may be the URL of one in a bucket.
      keep: The number of newest checkpoints to keep.
      keep_every: Also keep the steps that are multiples of this; 0 keeps none.
      best: Also keep the checkpoint with the best value of this metric, among those
        saved with it; empty keeps none.
      highest: Whether the highest value is the best, rather than the lowest.
      report: Called with the ``Save`` when a save has ended, in another thread.
      local: For a URL, where its small files are kept; by default a temporary folder.

    Raises:
      UserError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        best: str = "",
        highest: bool = False,
        report: Callable[[Save], None] = log,
        local: Path | None = None,
    ):
        if keep < 1 or keep_every < 0:
            raise UserError(
                f"Checkpointer: keep={keep} must be at least 1, and "
                f"keep_every={keep_every} at least 0"
            )
        check_path("Checkpointer: folder", folder, bucket=True)
        self._bucket = None
        self.folder = Path(folder).absolute()
        self._keep, self._keep_every = keep, keep_every
        self._best, self._highest = best, highest
        self._report = report
        self._saving: threading.Thread | None = None
        if is_bucket(folder):
            self.folder = local or temporary_folder(str(folder))
            self._bucket = BucketSaves(str(folder), self.folder)
            return
        orbax.silence()
        try:
            on_first(self._tidy)
        except OSError as error:
            raise UserError(
                f"cannot write checkpoints to {self.folder}: {error.strerror}"
            ) from error

    def steps(self) -> list[int]:
        """Returns the saved steps, ascending and not verified."""
        return find_steps(self.folder)

    # Saving.

    def save(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        frozen_from: Path | str | None = None,
    ) -> None:
        """Starts to save a state; returns once the state may be donated.

        Waits for the previous save first. A save that fails is reported on every
        process and never raised; earlier checkpoints remain.

        Args:
          state: Its ``step`` names the checkpoint; one of the same step is replaced.
          metrics: Metrics of this step, including the one that ``best`` names.
          config: Any JSON values, for the metadata.
          files: Texts that process 0 stores in the checkpoint, by file name.
          frozen_from: What the frozen parameters were read from: they are left out of
            the checkpoint, which names that path, or a name on the Hugging Face Hub,
            which is a str. None saves them.

        Raises:
          UserError: The state was donated to a train step.
        """
        check_kept(state)
        step = int(state.step)
        jax.block_until_ready(state)
        start = time.perf_counter()
        self.wait()
        content = metadata.describe(state, config=config or {}, metrics=metrics or {})
        if frozen_from is not None:
            sums = frozen.bit_sums(state)
            if isinstance(frozen_from, Path):
                source = address(frozen_from)  # of a copy
                frozen_from = source.url if source else str(frozen_from.absolute())
            content = frozen.left_out(content, frozen_from, sums)
        folder = self.folder / f"{step}{SAVING}"
        arrays = metadata.arrays_by_name(state)
        arrays = {name: arrays[name] for name in content["arrays"]}
        try:
            complete = self._start(folder, arrays, content, files or {})
        except Exception as error:  # training continues, whatever failed
            self._give_up(folder)
            blocked = time.perf_counter() - start
            self._report(Save(step, blocked, blocked, error=why(error)))
            return
        blocked = time.perf_counter() - start

        def finish() -> None:
            size, problem, overtaken = 0, "", False
            try:
                size = complete()
            except Exception as error:
                problem, overtaken = why(error), isinstance(error, Overtaken)
                self._give_up(folder)
            took = time.perf_counter() - start
            self._report(Save(step, blocked, took, size, problem, overtaken))

        # Not a daemon: a program waits for its last checkpoint before it exits.
        self._saving = threading.Thread(target=finish, name=f"save-{step}")
        self._saving.start()

    def _start(
        self,
        folder: Path,
        arrays: Mapping[str, Any],
        content: dict[str, Any],
        texts: Mapping[str, str],
    ) -> Callable[[], int]:
        """Starts a save; returns what completes it, and returns its bytes."""
        step = int(folder.stem)
        if (bucket := self._bucket) is not None:
            attempt = bucket.start(step, arrays)
            about = {"step": step, **content}
            return lambda: bucket.complete(attempt, about, texts, self._expired)
        on_first(lambda: self._make(folder))
        nested = unflatten_dict(arrays, sep=".")
        response = start_saving(folder, nested, content["arrays"])

        def complete() -> int:
            wait_for_arrays(response, folder)
            return self._complete(folder, {"step": step, **content}, texts)

        return complete

    def _give_up(self, folder: Path) -> None:
        if self._bucket is None:
            give_up(folder)

    def _make(self, folder: Path) -> None:
        """Creates a save's folder: if Orbax fails to, other processes wait minutes."""
        self._tidy()
        folder.mkdir()
        (folder / SOUND).touch()

    def _complete(
        self, folder: Path, content: dict[str, Any], texts: Mapping[str, str]
    ) -> int:
        """Completes a checkpoint whose arrays are written; returns its bytes."""
        process, count = jax.process_index(), jax.process_count()
        final = folder.with_suffix("")
        if process == 0:
            metadata.write(folder, content)
            for name, text in texts.items():
                replace_file(folder / name, text)
        files = manifest.checksum(folder, ARRAYS, process, count)
        if process > 0:
            replace_file(folder / _SHARE.format(process), json.dumps(files))
            wait_until(lambda: not folder.exists(), folder)
            # The folder was either renamed or removed.
            if not (final.exists() and manifest.read(final).items() >= files.items()):
                raise OSError(FAILED_ELSEWHERE)
            return 0
        for other in range(1, count):
            share = folder / _SHARE.format(other)
            wait_until(share.exists, folder)
            files |= json.loads(share.read_text(encoding="utf-8"))
            share.unlink()
        for name in (metadata.FILE, *texts):
            files |= manifest.checksum(folder, name)
        manifest.write(folder, files)
        step_folders.put_in_place(folder)
        self._retain(content["step"])
        return sum(file["bytes"] for file in files.values())

    def wait(self) -> None:
        """Waits for the save in progress, if any."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def __enter__(self) -> Self:
        """Returns the checkpointer."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for the last save."""
        self.wait()

    # Keeping.

    def _retain(self, newest: int) -> None:
        folders = {step: step_folder(self.folder, step) for step in self.steps()}
        for step in self._expired(folders, newest):
            step_folders.delete(folders[step])

    def _expired(self, folders: Mapping[int, Path], newest: int) -> list[int]:
        """Returns the steps to delete, given the folders of all that are complete."""
        steps = sorted(step for step in folders if step <= newest)
        kept = set(steps[-self._keep :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        if self._best:
            kept |= self._best_step({step: folders[step] for step in steps})
        return sorted(set(steps) - kept)

    def _best_step(self, folders: Mapping[int, Path]) -> set[int]:
        """Returns the step with the best metric, if any has it."""
        found = {}
        for step, folder in folders.items():
            with suppress(OSError, ValueError):  # the metadata is damaged
                metrics = metadata.read(folder)["metrics"]
                if np.isfinite(metrics.get(self._best, np.nan)):
                    found[step] = metrics[self._best]
        best = max if self._highest else min
        return {best(found, key=lambda step: found[step])} if found else set()

    def _tidy(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        step_folders.tidy(self.folder)

    # Restoring.

    def restore(self, abstract: TrainState, step: int | None = None) -> TrainState:
        """Reads a state onto the mesh, dtypes and memory kinds of ``abstract``.

        Each process verifies its share of the files, then each device reads its shards.

        Args:
          abstract: From ``FSDP.abstract_state``, on any mesh and with any policy;
            with frozen parameters that the checkpoint leaves out as arrays.
          step: The step to restore; None takes the newest intact checkpoint and warns
            about damaged newer ones.

        Raises:
          UserError: There is no checkpoint, none is intact, or it was written for
            another model or by a newer jshard.
        """
        if self._bucket is not None:
            self._bucket.refresh()
        if step is None:
            return restore_state(newest_intact(self.folder), abstract)
        found = self.steps()
        if step not in found:
            raise UserError(
                f"no checkpoint of step {step} in {self.folder}; there are: {found}"
            )
        folder = step_folder(self.folder, step)
        if damage := find_damage(folder):
            raise UserError(f"checkpoint {folder} is damaged: {damage}")
        return restore_state(folder, abstract)
