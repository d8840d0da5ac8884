"""Computes steps of a run again on other devices, and compares copies of its state."""

import functools
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jshard.data.batches import Batch
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.replay.replayed import Difference, Replay
from jshard.sharding.step.replay.replicas import bytes_sent, compare_copies
from jshard.sharding.step.replay.verdict import differs
from jshard.system.errors import RunFailed, UserError
from jshard.system.formatting import format_bytes
from jshard.training.callbacks.saving import Saving
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay
from jshard.training.watch.evidence import (
    Devices,
    keep_copies,
    keep_difference,
    say_copies,
    say_difference,
)


class Watching:
    """What `watch.replay` and `watch.replicas` ask for, each every so many steps.

    Attributes:
      note: What is done, and what it takes; empty for nothing.

    Raises:
      UserError: This mesh can do neither.
    """

    def __init__(self, run: PreparedRun):
        self._run, self._settings = run, run.settings.watch
        self._mesh: Any = run.job.fsdp.mesh
        self._replay: Replay | None = None
        self._agreed = 0  # the last step after which all copies were the same
        self._differences = 0
        self._took = 0.0  # for the newest step
        notes = []
        on_host = self._settings.replay_state == "host"
        if on_host and not self._settings.replay:
            raise UserError(
                "watch.replay_state=host: no step is computed again without "
                "watch.replay=N; give it, too, or leave both out"
            )
        if every := self._settings.replay:
            job, seed = run.job, run.settings.seed
            loss_fn = job.configured.recipe.loss_fn
            self._replay = Replay(
                job.fsdp, loss_fn, job.optimizer, seed, on_host=on_host
            )
            size = format_bytes(_bytes_of_shards(run.abstract_state))
            what = "its state in host memory" if on_host else "a second state"
            far = self._replay.distances[0]
            notes.append(
                f"replay          of the first step and every {_th(every)}, on the "
                f"devices {far} further on; {what}, {size} per device"
            )
        if every := self._settings.replicas:
            number, arrays, size = bytes_sent(self._mesh, run.abstract_state)
            if not number:
                raise UserError(
                    "watch.replicas compares what several devices hold copies of, and "
                    "on this mesh there is none: use watch.replicas=0"
                )
            notes.append(
                f"replicas        copies of {number} of {arrays} arrays compared every "
                f"{_th(every)} step, {format_bytes(size)} of sums"
            )
        self.note = "\n".join(notes)

    def begin(
        self, step: int, rows: Any, folder: RunFolder, display: ProgressDisplay
    ) -> None:
        """Checks the state and the program before the first step, on its batch.

        Raises:
          RunFailed: The program is not deterministic, or devices differ.
        """
        self._folder, self._display = folder, display
        self._first, self._agreed = step + 1, step
        if self._settings.replicas:
            self._run.peers.at("comparing copies", step)
            self._compare(step, "as restored" if step else "as it begins")
        if self._replay is not None:
            self._run.peers.at("computing a step again", step + 1)
            batch = self._run.job.fsdp.shard_batch(self._run.filled(rows))
            source = self._replay.source(self._run.state)
            found = self._replay.check(source, batch)
            self._run.state = source.state()
            if found:
                self._tell(step + 1, found, batch, kept="")

    def train_step(
        self, step: int, batch: Batch, log: StepLog, saving: Saving
    ) -> Mapping[str, jax.Array]:
        """Makes the run's step, and the same one elsewhere if it is time.

        Raises:
          RunFailed: The two differ, and `watch.on_difference=end`; the state before
            the step is saved.
        """
        self._took = 0.0
        every = self._settings.replay
        if self._replay is None or step % every:
            return self._run.train_step(step, batch)
        both = functools.partial(self._both, step, log, saving)
        return self._run.train_step(step, batch, both)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of what was done in the newest step."""
        found = {"replay_time": self._took} if self._took else {}
        return found | (
            {"differences": float(self._differences)} if self._differences else {}
        )

    def after_step(self, step: int, log: StepLog) -> None:
        """Compares copies if it is time.

        Raises:
          RunFailed: Copies differ, and `watch.on_difference=end`; nothing is saved.
        """
        every = self._settings.replicas
        if every and step % every == 0:
            with log.drained(shows=False):
                self._run.peers.at("comparing copies", step)
                self._compare(step)

    def _both(
        self,
        step: int,
        log: StepLog,
        saving: Saving,
        state: TrainState,
        batch: Any,
    ) -> Any:
        """Computes a step on other devices, then on its own; returns its results."""
        replay = self._replay
        assert replay is not None
        with log.drained(shows=False):
            self._run.peers.at("computing a step again", step)
            started = time.monotonic()
            source = replay.source(state)
            other = replay.elsewhere(source, batch, replay.distances[0])
            self._took = time.monotonic() - started
            self._run.peers.at("step", step)
        results, here = replay.here(source, batch)
        if not differs(here, other):
            return results
        del results  # so that no other state is in memory
        found = replay.explain(source, batch, here, other)
        ends, kept = self._settings.on_difference == "end", ""
        if ends:
            self._run.state = source.state()
        if ends and self._run.settings.checkpoint.every and step > self._first:
            try:
                saving.save(step - 1, log)
                saving.at_end(step - 1)
                kept = f"; the state before it is saved as step {step - 1}"
            except RunFailed as error:  # who computed wrong is told all the same
                kept = f"; the state before it could not be saved: {error}"
        self._tell(step, found, batch, kept)
        return replay.here(source, batch)[0]

    def _tell(self, step: int, found: Difference, batch: Any, kept: str) -> None:
        """Ends the run with what a difference shows, or says it."""
        devices, fetched = self._devices(), self._run.job.fsdp.fetch(batch)
        file = self._folder.path / f"difference-step-{step}.json"
        keep = functools.partial(keep_difference, file, step, found, devices, fetched)
        self._end_or_say(say_difference(step, found, devices), file, kept, keep)

    def _compare(self, step: int, when: str = "") -> None:
        found = compare_copies(self._mesh, self._run.state)
        if not found:
            self._agreed = step
            return
        devices = self._devices()
        file = self._folder.path / f"difference-after-step-{step}.json"
        keep = functools.partial(keep_copies, file, step, found, self._agreed, devices)
        line = say_copies(step, found, None if when else self._agreed, devices)
        self._end_or_say(line, file, f", {when}" if when else "", keep)

    def _end_or_say(
        self, line: str, file: Path, kept: str, keep: Callable[[], None]
    ) -> None:
        """Keeps the evidence, and ends the run or says what was found."""
        hashes = f"the hashes are in {self._run.shown}/{file.name}"
        if self._run.peers.index == 0:
            try:
                keep()
            except OSError as error:  # a full disk hides no device
                hashes = f"the hashes could not be written: {error.strerror or error}"
        line = f"{line}{kept}; {hashes}"
        if self._settings.on_difference == "end":
            raise RunFailed(line)
        self._differences += 1
        self._display.say(f"{line}; the run goes on (watch.on_difference)")

    def _devices(self) -> Devices:
        hosts = self._run.peers.share("host names", socket.gethostname())
        return Devices(self._mesh, hosts)


def _bytes_of_shards(state: TrainState) -> int:
    """Returns the bytes of a state that each device has."""
    shard = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
    shards = map(shard, jax.tree.leaves(state))
    return sum(x.size * x.dtype.itemsize for x in shards)


def _th(every: int) -> str:
    """Returns "100th", "1st"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(every % 10, "th")
    return f"{every}{'th' if every % 100 in (11, 12, 13) else ending}"
