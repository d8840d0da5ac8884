"""A run's checkpoints: saved while it trains, reported once they are complete."""

import queue
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np

from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.restore import CHECKPOINTS
from jshard.system.errors import RunFailed, UserError
from jshard.system.formatting import format_bytes
from jshard.training.callbacks.hooks import Hooks
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.report.run_files import METRICS
from jshard.training.run.bucket import Copying
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay


def check_room(workdir: Path, state: TrainState) -> None:
    """Raises a UserError if the disk of a run's folder has no room for a checkpoint."""
    place = workdir.absolute()
    while not place.is_dir():
        place = place.parent
    size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    disk = shutil.disk_usage(place)
    if disk.total and size > disk.free:  # some network disks report a total of 0
        raise UserError(
            f"--workdir={workdir}: a checkpoint takes {format_bytes(size)}, and the "
            f"disk has {format_bytes(disk.free)} left: make room, give another, or "
            "train without checkpoints by --config.checkpoint.every=0"
        )


class Saving(AbstractContextManager):
    """Saves a run's states, and reports saves in the run's folder and display.

    On exit it waits for the last save. With `checkpoint.every=0` it saves nothing.
    Frozen parameters are not saved if they were read from `frozen_from`.
    """

    def __init__(
        self,
        run: PreparedRun,
        folder: RunFolder,
        display: ProgressDisplay,
        hooks: Hooks,
        copying: Copying,
        frozen_from: Path | str | None = None,
    ):
        options = run.settings.checkpoint
        self._run, self._hooks = run, hooks
        self._folder, self._display, self._copying = folder, display, copying
        self._frozen_from = frozen_from
        self._ended: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._failed: Save | None = None  # the last save, if it failed
        self._checkpointer = None
        if options.every:
            self._checkpointer = Checkpointer(
                run.bucket.checkpoints if run.bucket else folder.path / CHECKPOINTS,
                keep=options.keep,
                keep_every=options.keep_every,
                keep_hours=options.keep_hours,
                best=options.best,
                highest=options.best_is == "highest",
                report=self._ended.put,
                local=folder.path / CHECKPOINTS,
                owner=run.bucket.owner if run.bucket else "",
            )

    def after_step(
        self, step: int, log: StepLog, evaluated: Mapping[str, float], *, ends: bool
    ) -> None:
        """Saves the state if it is time, or the run ends after this step.

        `evaluated` holds the metrics of the step's evaluation, if there was one.
        """
        options = self._run.settings.checkpoint
        last = ends or step == self._run.settings.steps
        best = bool(options.best and evaluated)
        if last or best or (options.every and step % options.every == 0):
            self.save(step, log, evaluated)

    def again(self, step: int, log: StepLog, evaluated: Mapping[str, float]) -> None:
        """Saves the state that a run resumed from, if its evaluation was missing.

        Otherwise it could not be the best one.
        """
        if self._run.settings.checkpoint.best:
            self.save(step, log, evaluated)

    def save(
        self, step: int, log: StepLog, evaluated: Mapping[str, float] | None = None
    ) -> None:
        """Starts to save the state after a step, with the step's metrics."""
        with log.drained() as metrics:
            if self._checkpointer is None:
                return
            self._run.peers.at("saving", step)
            self._folder.flush()
            state, bucket = self._run.state, self._run.bucket
            copied = bucket.copied(METRICS) if bucket else None
            metrics_text = self._folder.newest_metrics(copied)
            self._checkpointer.save(
                state,
                metrics={**metrics, **(evaluated or {})},
                config=self._folder.recorded,
                files={METRICS: metrics_text, **self._run.files_to_save()},
                frozen_from=self._frozen_from
                if jax.tree.leaves(state.frozen)
                else None,
            )

    def report(self) -> None:
        """Reports the saves that ended since the last call."""
        while not self._ended.empty():
            save = self._ended.get()
            self._failed = save if save.error else None
            if save.overtaken:
                self._copying.stop()
                raise RunFailed(f"{save.error}: this one ends")
            if save.error:
                self._display.say(
                    f"checkpoint of step {save.step} failed, training continues: "
                    f"{save.error}"
                )
                continue
            values = {
                "checkpoint_blocked": save.blocked,
                "checkpoint_write_time": save.took,
                "checkpoint_bytes": save.size,
            }
            self._folder.write(save.step, values)
            self._display.say(
                f"step {save.step}/{self._run.settings.steps}  checkpoint saved: "
                f"{format_bytes(save.size)} in {save.took:.1f} s, held up training "
                f"{save.blocked * 1e3:.0f} ms"
            )
            self._copying.after_save()
            returned = self._hooks.call("on_checkpoint", save.step, values)
            self._folder.log(save.step, returned)

    def at_end(self, step: int) -> None:
        """Waits for the last save; a RunFailed if it failed."""
        self._run.peers.at("finishing", step)
        self.__exit__()
        if self._failed is not None:
            raise RunFailed(
                f"the state of step {self._failed.step} could not be saved: "
                f"{self._failed.error}"
            )

    def __exit__(self, *exception: object) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self.report()
