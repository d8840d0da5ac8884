"""Copies of a run's state on its hosts: made while it trains, removed at its end."""

import queue
from contextlib import AbstractContextManager

from jshard.storage.checkpoint.local import Copy
from jshard.system.errors import Preempted
from jshard.system.formatting import format_bytes
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.report.run_files import METRICS
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay
from jshard.training.run.start import RUN, Start

_LONG = 1.0  # seconds that a step waits for the copy before, which is worth a line


class LocalSaving(AbstractContextManager):
    """Copies a run's states, and removes the copies if it ends with its state saved.

    With `checkpoint.local=0` it does nothing.
    """

    def __init__(
        self,
        run: PreparedRun,
        start: Start,
        folder: RunFolder,
        display: ProgressDisplay,
    ):
        self._run, self._start = run, start
        self._folder, self._display = folder, display
        self._ended: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._said: set[str] = set()
        if run.copies is not None:
            folder.note(**{RUN: start.run})

    def after_step(self, step: int, log: StepLog, *, ends: bool) -> None:
        """Copies the state if it is time; not at the end, where it is saved."""
        copies, settings = self._run.copies, self._run.settings
        self._report()
        if copies is None or step % settings.checkpoint.local:
            return
        if ends or step == settings.steps:
            return
        with log.drained(shows=False):  # the metrics of the step are in its copy
            self._run.peers.at("saving", step)
            copied = self._run.bucket and self._run.bucket.copied(METRICS)
            newest = self._folder.newest_metrics(copied)
            texts = {METRICS: newest, **self._run.files_to_save()}
            start = self._start
            copies.keep(
                self._run.state, start.run, start.number, texts, self._ended.put
            )

    def _report(self) -> None:
        """Shows the first copy, the first that steps waited for, and failed ones."""
        while not self._ended.empty():
            copy = self._ended.get()
            if copy.error:
                self._display.say(
                    f"local copy of step {copy.step} failed, training continues: "
                    f"{copy.error}"
                )
                continue
            self._say_once(
                "first",
                f"step {copy.step}/{self._run.settings.steps}  local copy: "
                f"{format_bytes(copy.size)} per process in {copy.took:.1f} s, held up "
                f"training for {copy.blocked * 1e3:.0f} ms",
            )
            if copy.waited > _LONG:
                self._say_once(
                    "slow",
                    f"local copies take longer than checkpoint.local="
                    f"{self._run.settings.checkpoint.local} steps: training waited "
                    f"{copy.waited:.1f} s for one; raise checkpoint.local",
                )

    def _say_once(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._display.say(text)

    def __exit__(self, kind: type[BaseException] | None = None, *rest: object) -> None:
        if self._run.copies is not None and (kind is None or kind is Preempted):
            self._run.copies.delete()
