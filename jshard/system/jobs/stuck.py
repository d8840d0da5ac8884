"""How long a process may stay at one place, learned from its own run.

A process that is alive but stuck keeps sending heartbeats (jax-ml/jax#38503), so only
time tells. What is too long depends on the phase; each has a limit of its own.
"""

import collections
import statistics
import threading
import time
from collections.abc import Callable

import jax

LEAST = 50.0  # seconds; with the time to notice, a minute
LEAST_SAVING = 600.0  # a disk may be slow for minutes
UNKNOWN = 1800.0  # seconds for what was never seen: compilation, the first evaluation
TIMES = 10  # the limit over the average duration
STAYS = 10  # how many of the last durations are averaged
# The phases of a step: dispatch, wait, what is called after it, next batch.
STEP = ("step", "computing", "hooks", "data")


class Patience:
    """Learns how long the phases of a process take.

    Args:
      fixed: seconds for every phase, instead of learned ones; 0 sets no limit.
    """

    def __init__(self, fixed: float | None = None):
        self._fixed = fixed
        self._phase, self._since = "", time.monotonic()
        self._stays: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=STAYS)
        )

    def at(self, phase: str) -> float:
        """Records the move to a phase; returns the seconds that it may take."""
        now = time.monotonic()
        self._stays[self._phase].append(now - self._since)
        self._phase, self._since = phase, now
        if self._fixed is not None:
            return self._fixed or float("inf")
        means = {name: statistics.fmean(stays) for name, stays in self._stays.items()}
        if phase in STEP:
            if "computing" not in means:  # the first step also connects the devices
                return UNKNOWN
            if "step" not in means:  # the second one may compile again
                first = means.get("compiling", UNKNOWN) + means["computing"]
                return min(UNKNOWN, max(LEAST, TIMES * first))
            return max(LEAST, TIMES * sum(means.get(part, 0.0) for part in STEP))
        if phase in ("evaluating", "saving") and phase in means:
            least = LEAST_SAVING if phase == "saving" else LEAST
            return max(least, TIMES * means[phase])
        return UNKNOWN


PERIOD = 1.0  # seconds between checks
IDLE = 12.0  # seconds without progress and without work that are too many
BUSY = 0.1  # share of one core above which a process counts as working

_WAITS_FOR = {
    "data": "the recipe's data",
    "reading the first batch": "the recipe's data",
    "reading the first evaluation batch": "the recipe's data",
    "restoring": "the disk",
    "saving": "the disk",
    "finishing": "the disk",
}


class IdleDetector:
    """A thread that reports if this process neither progresses nor works.

    A context manager; the thread runs within it.

    Args:
      report: called with one line for each place where the process is stuck.
    """

    def __init__(self, report: Callable[[str], None]):
        self._report = report
        self._moves, self._phase, self._step = 0, "", 0
        self._patience = UNKNOWN
        self._over = threading.Event()

    def __enter__(self) -> "IdleDetector":
        threading.Thread(target=self._run, name="jshard-idle", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def at(self, phase: str, step: int, patience: float = UNKNOWN) -> None:
        """Sets where this process is and how many seconds it may stay there."""
        self._phase, self._step, self._patience = phase, step, patience
        self._moves += 1

    def _run(self) -> None:
        reported = moves = 0
        moved = worked = now = time.monotonic()
        work = time.process_time()
        while not self._over.wait(PERIOD):
            last, now = now, time.monotonic()
            before, work = work, time.process_time()
            suspended = now - last > 2 * PERIOD  # by a signal, or with the machine
            if suspended or self._moves != moves:
                moved, moves = now, self._moves
            working = work - before > BUSY * (now - last)
            worked = now if working else max(worked, moved)
            if reported == moves or now - moved <= IDLE:
                continue
            cpus = jax.default_backend() == "cpu"
            seconds = now - (worked if cpus else moved)
            if seconds > (IDLE if cpus else self._patience):
                reported = moves
                self._report(self._line(seconds, cpus))

    def _line(self, seconds: float, cpus: bool) -> str:
        why = "its devices wait for each other" if cpus else "much longer than before"
        if awaited := _WAITS_FOR.get(self._phase):
            why = f"it waits for {awaited}"
        been = "neither made progress nor computed" if cpus else "made no progress"
        return (
            f"step {self._step} ({self._phase}) has {been} for {seconds:.0f} s: {why}. "
            "If that lasts, stop the run and start it again with the same --workdir: "
            "it resumes from its newest checkpoint"
        )
