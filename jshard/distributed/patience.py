"""How long a process may stay at a place, learned from its own stays.

A process that is alive but stuck beats on (jax-ml/jax#38503): only the time tells. What
is too long depends on what it does, so each phase has a limit of its own.
"""

import collections
import statistics
import time

LEAST = 50.0  # seconds: with the watch's own, a minute
LEAST_SAVING = 600.0  # a disk may slow down for minutes
UNKNOWN = 1800.0  # seconds for what was never seen: compilation, the first evaluation
TIMES = 10  # what phases took on average
STAYS = 10  # that count
STEP = ("step", "computing", "data")  # the phases of a step: handed out, done, and next


class Patience:
    """Learns how long the phases of a process take.

    In each phase of a step it may stay for as long as ten steps take.
    """

    def __init__(self, fixed: float | None = None):
        """Knows nothing yet.

        Args:
          fixed: seconds for every phase, in place of learned ones; 0 is for ever.
        """
        self._fixed = fixed
        self._phase, self._since = "", time.monotonic()
        self._stays: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=STAYS)
        )

    def at(self, phase: str) -> float:
        """Takes note of the move to a phase; returns the seconds that it may take."""
        now = time.monotonic()
        self._stays[self._phase].append(now - self._since)
        self._phase, self._since = phase, now
        if self._fixed is not None:
            return self._fixed or float("inf")
        return self._learned(phase)

    def _learned(self, phase: str) -> float:
        means = {name: statistics.fmean(stays) for name, stays in self._stays.items()}
        if phase in STEP:
            if "computing" not in means:  # the first step also connects the devices
                return UNKNOWN
            if "step" not in means:  # the second one may compile once more
                first = means.get("compiling", UNKNOWN) + means["computing"]
                return min(UNKNOWN, max(LEAST, TIMES * first))
            return max(LEAST, TIMES * sum(means.get(part, 0.0) for part in STEP))
        if phase in ("evaluating", "saving") and phase in means:
            least = LEAST_SAVING if phase == "saving" else LEAST
            return max(least, TIMES * means[phase])
        return UNKNOWN
