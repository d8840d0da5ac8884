"""Checkpoints: asynchronous sharded saves, verified restores onto any mesh.

Where and how a step is written is in ``disk_saves`` and ``buckets.saves``; how its
processes hear of each other is in ``participants``.
"""

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax

from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.state import TrainState, check_kept
from jshard.storage.checkpoint import frozen, metadata
from jshard.storage.checkpoint.array_bits import hashes_of
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.buckets.mirror import temporary_folder
from jshard.storage.checkpoint.buckets.objects import Overtaken
from jshard.storage.checkpoint.buckets.saves import BucketSaves
from jshard.storage.checkpoint.disk_saves import DiskSaves
from jshard.storage.checkpoint.orbax.folder import check_not_orbax
from jshard.storage.checkpoint.participants import Participants, why
from jshard.storage.checkpoint.restore import find_damage, newest_intact, restore_state
from jshard.storage.checkpoint.selected.best_step import best_among, hours_apart
from jshard.storage.checkpoint.step_folders import find_steps, step_folder
from jshard.system.cli.paths import check_path, is_bucket
from jshard.system.errors import UserError

_checkpointers = itertools.count()  # all processes make them in one order


@dataclasses.dataclass(frozen=True)
class Save:
    """The outcome of a save."""

    step: int
    blocked: float  # seconds that ``save`` blocked its caller, the state computed
    took: float  # seconds until the checkpoint was complete
    size: int = 0  # its bytes
    error: str = ""  # why the save failed, on one line
    overtaken: bool = False  # whether because a run that was started later saves there


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
      keep_hours: Also keep the first step, and then each that was saved at least this
        many hours after the last one that is kept so; 0 keeps none.
      best: Also keep the checkpoint with the best value of this metric, among those
        saved with it; empty keeps none.
      highest: Whether the highest value is the best, rather than the lowest.
      report: Called with the ``Save`` when a save has ended, in another thread.
      local: For a URL, where its small files are kept; by default a temporary folder.
      owner: For a URL, who owns its list of steps already; by default this becomes the
        owner, and a run that owned it ends.

    Raises:
      UserError: The folder cannot be written, or Orbax keeps checkpoints there.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        keep_hours: float = 0,
        best: str = "",
        highest: bool = False,
        report: Callable[[Save], None] = log,
        local: Path | None = None,
        owner: str = "",
    ):
        if keep < 1 or keep_every < 0 or not 0 <= keep_hours < math.inf:
            raise UserError(
                f"Checkpointer: keep={keep} must be at least 1, and "
                f"keep_every={keep_every} and keep_hours={keep_hours} at least 0"
            )
        check_path("Checkpointer: folder", folder, bucket=True)
        self._keep, self._keep_every, self._keep_hours = keep, keep_every, keep_hours
        self._best, self._highest = best, highest
        self._report = report
        self._saving: threading.Thread | None = None
        self._name, self._numbers = f"saves {next(_checkpointers)}", itertools.count()
        self._saves: DiskSaves | BucketSaves
        try:
            if is_bucket(folder):
                self.folder = local or temporary_folder(str(folder))
                self._saves = BucketSaves(str(folder), self.folder, owner)
            else:
                self.folder = Path(folder).absolute()
                check_not_orbax(self.folder)
                self._saves = DiskSaves(self.folder)
        except OSError as error:
            raise UserError(
                f"cannot write checkpoints to {folder}: {error.strerror}"
            ) from error

    def steps(self) -> list[int]:
        """Returns the saved steps, ascending and not verified."""
        return find_steps(self.folder)

    # Saving.

    @own_mesh()
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
        about = {"config": config or {}, "metrics": metrics or {}}
        group = Participants(self._name, next(self._numbers))

        def failed(error: Exception) -> Save:  # training continues, whatever failed
            with suppress(jax.errors.JaxRuntimeError):  # the job ends
                group.end(why(error))
            self._saves.give_up()
            took = time.perf_counter() - start
            overtaken = isinstance(error, Overtaken)
            return Save(step, took, took, error=why(error), overtaken=overtaken)

        try:
            content, arrays = _described(state, frozen_from, **about)
            started = self._saves.start(step, arrays, content["arrays"])
        except Exception as error:
            self._report(failed(error))
            return
        blocked = time.perf_counter() - start

        def finish() -> None:
            try:
                size = 0
                parts = group.gather(self._saves.write(started, group))
                if group.index == 0:
                    size = self._saves.commit(
                        content, files or {}, parts, self._expired
                    )
                    group.end()
            except Exception as error:
                self._report(dataclasses.replace(failed(error), blocked=blocked))
                return
            took = time.perf_counter() - start
            self._report(Save(step, blocked, took, size))

        # Not a daemon: a program waits for its last checkpoint before it exits.
        self._saving = threading.Thread(target=finish, name=f"save-{step}")
        self._saving.start()

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

    def _expired(self, folders: Mapping[int, Path], newest: int) -> list[int]:
        """Returns the steps to delete, given the folders of all that are complete."""
        steps = sorted(step for step in folders if step <= newest)
        kept = set(steps[-self._keep :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        complete = {step: folders[step] for step in steps}
        if self._keep_hours:
            kept |= hours_apart(complete, self._keep_hours)
        if self._best:
            best = best_among(complete, self._best, highest=self._highest)
            kept |= {best.step} if best else set()
        return sorted(set(steps) - kept)

    # Restoring.

    @own_mesh()
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
        if isinstance(self._saves, BucketSaves):
            self._saves.refresh()
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


def _described(
    state: TrainState, frozen_from: Path | str | None, **about: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a checkpoint's metadata, and the arrays that are in it."""
    content = metadata.describe(state, **about)
    if frozen_from is not None:
        sums = frozen.bit_sums(state)
        if isinstance(frozen_from, Path):
            frozen_from = shown(frozen_from.absolute())  # of a copy, the URL
        content = frozen.left_out(content, frozen_from, sums)
    content, described = {"step": int(state.step), **content}, content["arrays"]
    arrays = metadata.arrays_by_name(state)
    arrays = {name: arrays[name] for name in described}
    shapes = {name: entry["shape"] for name, entry in described.items()}
    for name, bits in hashes_of(arrays, shapes).items():
        if bits:  # copies that differ are watch.replicas' concern
            described[name][metadata.BITS] = bits
    return content, arrays
