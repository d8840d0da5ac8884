"""A run's checkpoints: saved while it trains, reported once they are complete."""

import queue
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.checkpoint.checkpointer import Checkpointer, Save
from jshard.checkpoint.restore import CHECKPOINTS
from jshard.config.run_config import Config
from jshard.errors import RunFailed, UserError
from jshard.formatting import format_bytes
from jshard.fsdp.state import TrainState
from jshard.report.run_report import METRICS
from jshard.run.metrics import RunFolder
from jshard.run.progress import ProgressDisplay


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
    Frozen parameters are not saved if they were read from `frozen_from`. `saved` is
    called with the step and the metrics of each save that is complete.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        display: ProgressDisplay,
        frozen_from: Path | None = None,
        saved: Callable[[int, Mapping[str, float]], object] = lambda step, values: None,
    ):
        options = config.checkpoint
        self._config = config
        self._folder, self._display = folder, display
        self._frozen_from, self._saved = frozen_from, saved
        self._ended: queue.SimpleQueue[Save] = queue.SimpleQueue()
        self._failed: Save | None = None  # the last save, if it failed
        self._checkpointer = None
        if options.every:
            self._checkpointer = Checkpointer(
                folder.path / CHECKPOINTS,
                keep=options.keep,
                keep_every=options.keep_every,
                best=options.best,
                highest=options.best_is == "highest",
                report=self._ended.put,
            )

    def due(self, step: int, *, evaluated: bool) -> bool:
        """Returns whether to save the state after `step`."""
        options = self._config.checkpoint
        if self._checkpointer is None:
            return False
        best = bool(options.best) and evaluated
        return best or step % options.every == 0 or step == self._config.steps

    def save(self, state: Any, metrics: Mapping[str, float]) -> None:
        """Starts to save a state, with the metrics of its step."""
        assert self._checkpointer is not None
        self._folder.flush()
        self._checkpointer.save(
            state,
            metrics=metrics,
            config=self._folder.config,
            files={METRICS: self._folder.metrics()},
            frozen_from=self._frozen_from if jax.tree.leaves(state.frozen) else None,
        )

    def report(self) -> None:
        """Reports the saves that ended since the last call."""
        while not self._ended.empty():
            save = self._ended.get()
            self._failed = save if save.error else None
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
                f"step {save.step}/{self._config.steps}  checkpoint saved: "
                f"{format_bytes(save.size)} in {save.took:.1f} s, held up training "
                f"{save.blocked * 1e3:.0f} ms"
            )
            self._saved(save.step, values)

    def finish(self) -> None:
        """Waits for the last save; a RunFailed if it failed."""
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
