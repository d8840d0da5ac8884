"""Where the time of a run's attempt goes: every second of it has one category.

While the devices have a step under way, a second is one of training, whatever the
process does meanwhile. Otherwise it is one of what the process does.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from jshard.system.compat.compilations import timed_compilations
from jshard.system.errors import UserError
from jshard.training.report.goodput import ATTEMPTS, OTHER, newest_attempt
from jshard.training.run.append import AppendedFile
from jshard.training.run.background import PATIENCE

# Categories, by the phases that `Peers.at` is told. One that is not here is "other".
_CATEGORIES = {
    "": "starting",
    "setting up": "starting",
    "choosing by memory": "starting",
    "making initial values": "starting",
    "computing what is kept": "starting",
    "reading the first batch": "data",
    "reading tasks": "data",
    "reading the first evaluation batch": "data",
    "compiling": "compiling",
    "restoring": "restoring",
    "data": "data",
    "step": "training",
    "computing": "training",
    "hooks": "hooks",
    "evaluating": "evaluating",
    "sampling": "evaluating",
    "predicting": "evaluating",
    "saving": "saving",
    "finishing": "saving",
    "profiling": "profiling",
    "comparing copies": "checking",
    "computing a step again": "checking",
}
_SOONEST, _LATEST = 1.0, 30.0  # seconds between two lines; in between, a hundredth
_LATEST_STEP = 10.0  # seconds that the end of a run waits for a step


class _Steps:
    """When the devices completed the step that was dispatched last."""

    def __init__(self) -> None:
        self.completed = self._dispatched = 0
        self._at = 0.0  # when the newest completed step was
        self._given: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def dispatched(self, step: int, metrics: Any) -> None:
        self._dispatched = step
        self._given.put((step, metrics))

    def busy(self, begin: float, end: float) -> float:
        """Returns for how many seconds between these the devices had a step."""
        if self.completed < self._dispatched:
            return end - begin
        return max(0.0, min(self._at, end) - begin)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Has a thread wait for each step within it.

        A thread that is still in JAX when Python ends would abort the process. It is
        waited for only so long, as a step may never end.
        """
        thread = threading.Thread(target=self._watch, name="jshard-steps", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._given.put((0, None))
            thread.join(_LATEST_STEP)

    def _watch(self) -> None:
        while (given := self._given.get())[0]:
            step, metrics = given
            with suppress(RuntimeError):  # of a step that failed: the loop raises it
                jax.block_until_ready(metrics)
            self._at = time.perf_counter()
            self.completed = step  # last: another thread reads both


class _Now(NamedTuple):
    """What the process does, replaced as a whole: other threads read it."""

    phase: str
    step: int
    since: float
    seconds: Mapping[str, float]  # until then


class Account(AbstractContextManager):
    """The seconds of this attempt by category; a context manager, for its thread.

    Args:
      started: When the attempt started, as `time.time()`.
      enabled: False keeps none, as in all processes but the first.
    """

    def __init__(self, started: float, *, enabled: bool = True):
        self._started, self._enabled = started, enabled
        spent = max(0.0, time.time() - started)
        self._now = _Now("", 0, time.perf_counter(), {"starting": spent})
        self._apart: dict[str, float] = {}  # seconds within the phase, by category
        self._steps = _Steps()
        self._within = ExitStack()
        # What is to be written besides the lines of now and then; None ends that.
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._attempt: dict[str, Any] = {}  # what is the same in all its lines

    def __enter__(self) -> Self:
        if self._enabled:
            timed = timed_compilations(lambda x: self.apart("compiling", x))
            self._within.enter_context(timed)
            self._within.enter_context(self._steps.watched())
        return self

    def __exit__(self, *exception: object) -> None:
        self._within.close()

    def at(self, phase: str, step: int) -> None:
        """Notes what the process does from now on, in or after which step."""
        now = time.perf_counter()
        seconds, left = self._until(now), self._now
        self._now, self._apart = _Now(phase, step, now, seconds), {}
        if left.phase == "saving" and self._attempt:
            # A run that goes on from here keeps what came before.
            self._lines.put(self._line() | {"step": left.step, "saved": True})

    def dispatched(self, step: int, metrics: Any) -> None:
        """Notes that the devices have a step to do, which returns `metrics`."""
        if self._enabled:
            self._steps.dispatched(step, metrics)

    def apart(self, category: str, seconds: float) -> None:
        """Counts seconds that have just passed in the phase as another category."""
        self._apart[category] = self._apart.get(category, 0.0) + seconds

    @contextmanager
    def recorded(
        self, workdir: Path, from_step: int, reached: int = 0
    ) -> Iterator[None]:
        """Adds lines to the run's `attempts.jsonl` within it.

        A thread does, so that a phase of minutes has lines, too, if the process is
        killed in it. A disk that is full or gone costs lines, not the run.

        Args:
          workdir: The run's folder, which this process has locked.
          from_step: The steps that were done before this attempt.
          reached: The last step that an earlier attempt has metrics of.

        Raises:
          UserError: The file cannot be read or written.
        """
        if not self._enabled:
            yield
            return
        path = workdir / ATTEMPTS
        try:
            attempt, file = newest_attempt(workdir) + 1, AppendedFile(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        self._attempt = {
            "attempt": attempt,
            "from_step": from_step,
            "reached": reached,
            "started": round(self._started, 3),
        }
        file.write(b"\n" * file.is_torn())
        self._lines.put(self._line())
        thread = threading.Thread(
            target=self._write, args=(file,), name="jshard-account", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._lines.put(self._line())
            self._lines.put(None)
            thread.join(PATIENCE)

    def _write(self, file: AppendedFile) -> None:
        """Writes lines until there is none; those that follow each other rarely."""
        line = self._lines.get()
        while line is not None:
            file.write(f"{json.dumps(line)}\n".encode())
            lasts = sum(line["seconds"].values())
            try:
                line = self._lines.get(timeout=min(max(_SOONEST, lasts / 100), _LATEST))
            except queue.Empty:
                line = self._line()
        file.close()

    def _line(self) -> dict[str, Any]:
        seconds = self._until(time.perf_counter())
        step = max(self._steps.completed, self._attempt.get("from_step", 0))
        return {
            **self._attempt,
            "time": round(self._started + sum(seconds.values()), 3),
            "step": step,
            "seconds": {name: round(x, 3) for name, x in seconds.items()},
        }

    def _until(self, now: float) -> dict[str, float]:
        """Returns the seconds by category until now, which sum to the wall time."""
        phase, _, since, before = self._now
        spent = max(0.0, now - since)
        busy = self._steps.busy(since, since + spent)
        parts, idle = [("training", busy)], spent - busy
        for category, seconds in dict(self._apart).items():
            parts.append((category, min(seconds, idle)))
            idle -= min(seconds, idle)
        parts.append((_CATEGORIES.get(phase, OTHER), idle))
        found = dict(before)
        for category, seconds in parts:
            found[category] = found.get(category, 0.0) + seconds
        return found
