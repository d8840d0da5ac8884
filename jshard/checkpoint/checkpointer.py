"""Checkpoints: asynchronous sharded saves, verified restores onto any mesh.

A step's folder is built under another name, ``100.saving``: the arrays by Orbax, every
process its shards; then a description; then the manifest with a checksum of every file;
and last it is put in its place (``step_folders``). So whatever the process
dies in, a folder with a number for a name was once whole, and the manifest tells
whether it still is.

Several processes meet in that folder. Each leaves the checksums of its part there for
process 0, which does the rest; and a file that any of them removes when its save fails,
for which the others look, since Orbax would wait for that one for 20 minutes.
"""

import dataclasses
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jshard.checkpoint import manifest, metadata, step_folders
from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.restore import ARRAYS, find_damage, newest_whole, restore_state
from jshard.checkpoint.step_folders import SAVING, SOUND, find_steps, step_folder
from jshard.compat import orbax_noise
from jshard.errors import UserError
from jshard.state import TrainState

_PART = ".part-{}.json"  # a file in the folder of a save: checksums of one process
# Bytes that a reader of one layer, or of other shards, may have to read around them.
_CHUNK = 256 << 20
_FILE = 256 << 20  # bytes: files are what processes and threads share out to verify
_PATIENCE = 1200  # seconds to wait for the other processes: Orbax's own
_POLL = 0.02  # seconds between looks at the disk for them
_ELSEWHERE = "the save failed on another process"


@dataclasses.dataclass(frozen=True)
class Save:
    """How a save went.

    Attributes:
      step: which.
      blocked: seconds that ``save`` held up its caller, once the state was computed.
      took: seconds until the checkpoint was whole.
      size: its bytes.
      error: why it failed, one line; empty when it did not.
    """

    step: int
    blocked: float
    took: float
    size: int = 0
    error: str = ""


def log(save: Save) -> None:
    """Reports a save through Python's logging; an error reaches stderr by default."""
    logger = logging.getLogger("jshard")
    if save.error:
        logger.error("checkpoint of step %d failed: %s", save.step, save.error)
    else:
        logger.info("checkpoint of step %d saved in %.1f s", save.step, save.took)


class Checkpointer:
    """Saves states into a folder, and restores them.

    Every process calls every method, at the same steps. The folder is one that all
    of them see. When a save fails on one process, another's thread may wait for it in
    Orbax for 20 minutes; ``jax.distributed.shutdown()`` at a program's end ends that.

    Args:
      folder: made when it is not there.
      keep: how many of the newest checkpoints to keep.
      keep_every: keep also the steps that this divides; 0 is none.
      best: keep also the checkpoint with the best of this metric, of those that were
        saved with one; empty is none.
      highest: whether the highest is the best, not the lowest.
      report: called with each ``Save`` when it has ended, in a thread of its own.

    Raises:
      UserError: the folder cannot be written.
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
    ):
        if keep < 1 or keep_every < 0:
            raise UserError(
                f"Checkpointer: keep={keep} must be at least 1, and "
                f"keep_every={keep_every} at least 0"
            )
        self.folder = Path(folder).absolute()
        self._keep, self._keep_every = keep, keep_every
        self._best, self._highest = best, highest
        self._report = report
        self._saving: threading.Thread | None = None
        orbax_noise.silence()
        try:
            _on_first(self._tidy)
        except OSError as error:
            raise UserError(
                f"cannot write checkpoints to {self.folder}: {error.strerror}"
            ) from error

    def steps(self) -> list[int]:
        """The steps that were saved and not deleted, ascending; not verified."""
        return find_steps(self.folder)

    # Saving.

    def save(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Starts to save a state, and returns once it may be donated.

        Waits for the save before, if that is still going on. A save that fails is
        reported, never raised, and leaves the checkpoints that were there. With
        several processes it fails on all of them, and each reports it.

        Args:
          state: whose ``step`` names the checkpoint; one of the same step is replaced.
          metrics: of this step; ``best`` looks there.
          config: anything JSON, for the description.
          files: texts to keep beside it, process 0's, by the names of their files.
        """
        step = int(state.step)
        jax.block_until_ready(state)
        start = time.perf_counter()
        self.wait()
        content = metadata.describe(state, config=config or {}, metrics=metrics or {})
        folder = self.folder / f"{step}{SAVING}"
        arrays = metadata.nest(metadata.arrays_by_name(state))
        try:
            _on_first(lambda: self._make(folder))
            with _context(content["arrays"]):
                response = ocp.save_async(folder / ARRAYS, arrays)
        except Exception as error:  # whatever it is, training goes on
            _give_up(folder)
            blocked = time.perf_counter() - start
            self._report(Save(step, blocked, blocked, error=_why(error)))
            return
        blocked = time.perf_counter() - start

        def finish() -> None:
            size, problem = 0, ""
            try:
                _wait_for_arrays(response, folder)
                about = {"step": step, **content}
                size = self._complete(folder, about, files or {})
            except Exception as error:
                problem = _why(error)
                _give_up(folder)
            took = time.perf_counter() - start
            self._report(Save(step, blocked, took, size, problem))

        # No daemon: a program that ends waits for its last checkpoint.
        self._saving = threading.Thread(target=finish, name=f"save-{step}")
        self._saving.start()

    def _make(self, folder: Path) -> None:
        """Makes a save's folder, for where Orbax cannot the others wait for minutes."""
        self._tidy()
        folder.mkdir()
        (folder / SOUND).touch()

    def _complete(
        self, folder: Path, content: dict[str, Any], texts: Mapping[str, str]
    ) -> int:
        """Makes a checkpoint of what Orbax has written; returns its bytes."""
        process, count = jax.process_index(), jax.process_count()
        final = folder.with_suffix("")
        if process == 0:
            metadata.write(folder, content)
            for name, text in texts.items():
                replace_file(folder / name, text)
        files = manifest.checksum(folder, ARRAYS, process, count)
        if process > 0:
            replace_file(folder / _PART.format(process), json.dumps(files))
            _wait_until(lambda: not folder.exists(), folder)
            # Renamed, or given up?
            if not (final.exists() and manifest.read(final).items() >= files.items()):
                raise OSError(_ELSEWHERE)
            return 0
        for other in range(1, count):
            part = folder / _PART.format(other)
            _wait_until(part.exists, folder)
            files |= json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        for name in (metadata.FILE, *texts):
            files |= manifest.checksum(folder, name)
        manifest.write(folder, files)
        step_folders.put_in_place(folder)
        self._retain(content["step"])
        return sum(file["bytes"] for file in files.values())

    def wait(self) -> None:
        """Waits until the save that is going on, if any, has ended."""
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
        steps = [step for step in self.steps() if step <= newest]
        kept = set(steps[-self._keep :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        if self._best:
            kept |= self._best_step(steps)
        for step in sorted(set(steps) - kept):
            step_folders.delete(step_folder(self.folder, step))

    def _best_step(self, steps: list[int]) -> set[int]:
        """The step with the best metric, if any has it."""
        found = {}
        for step in steps:
            with suppress(OSError, ValueError):  # a damaged one is not the best
                folder = step_folder(self.folder, step)
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
        """Reads a state onto the mesh, dtypes and memory that ``abstract`` asks for.

        Each process verifies its part of the files, then each device reads its
        shards. Without ``step`` it is the newest checkpoint that is whole; those that
        are damaged are skipped with a warning that says what is wrong with them.

        Args:
          abstract: of ``FSDP.abstract_state``: on any mesh, with any policy.
          step: which; None is the newest.

        Raises:
          UserError: there is no checkpoint, none is whole, or it is of another model
            or of a newer jshard.
        """
        if step is None:
            return restore_state(newest_whole(self.folder), abstract)
        found = self.steps()
        if step not in found:
            raise UserError(
                f"no checkpoint of step {step} in {self.folder}; there are: {found}"
            )
        folder = step_folder(self.folder, step)
        if damage := find_damage(folder):
            raise UserError(f"checkpoint {folder} is damaged: {damage}")
        return restore_state(folder, abstract)


def _context(described: Mapping[str, Any]) -> ocp.Context:
    """How Orbax writes arrays, which are described by name."""
    storage = ocp.options.ArrayOptions.Saving.StorageOptions

    def bounded(path: Any, array: jax.Array) -> Any:
        shard = np.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if not array.ndim or shard <= _CHUNK:
            return None  # a shard is a chunk, which is written without a copy
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # A Stack is cut into its layers: who reads one need not read others. (Orbax
        # cuts the axes it is given to the end, whatever the size.)
        axes = (0,) if described[name].get("layer_dims") else None
        return storage(chunk_byte_size=_CHUNK, shard_axes=axes)

    context = ocp.Context()
    context.array.saving.scoped_storage_options_creator = bounded
    # Trained floats shrink by a tenth, and compressing them takes seven times as long.
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = _FILE
    # Replicas write a part each of what is large; cutting up the small takes longer.
    context.array.saving.min_slice_bytes_for_replica_parallel = 1 << 20
    context.asynchronous.create_directories_asynchronously = False
    return context


def _on_first(action: Callable[[], None]) -> None:
    """Does something on process 0; where that raises an OSError, all do."""
    code = 0
    if jax.process_index() == 0:
        try:
            action()
        except OSError as error:
            code = error.errno or errno.EIO
    code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
    if code:
        raise OSError(code, os.strerror(code))


def _wait_for_arrays(response: Any, folder: Path) -> None:
    """Waits until Orbax has written all arrays, or a process has failed to."""
    if jax.process_count() == 1:
        return response.result()
    written: Future[None] = Future()

    def wait() -> None:
        try:
            written.set_result(response.result())
        except BaseException as error:
            written.set_exception(error)

    # A daemon: it is left behind where another process has failed.
    threading.Thread(target=wait, daemon=True).start()
    _wait_until(written.done, folder)
    written.result()


def _give_up(folder: Path) -> None:
    """Tells the others that a save has failed here, and removes it."""
    with suppress(OSError):
        (folder / SOUND).unlink()
    if jax.process_index() == 0:
        step_folders.give_up(folder)


def _wait_until(condition: Callable[[], bool], folder: Path) -> None:
    """Waits for other processes, until a save is given up by one of them."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        sound = (folder / SOUND).exists()  # before: what ends well removes it too
        if condition():
            return
        if not sound:
            raise OSError(_ELSEWHERE)
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process was not done in {_PATIENCE} s")
        time.sleep(_POLL)


def _why(error: BaseException) -> str:
    """The message at the end of the chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        if os.strerror(number) in str(error):  # in the midst of TensorStore's words
            return os.strerror(number)
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
