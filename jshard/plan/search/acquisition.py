"""Chooses the most promising candidate to compile next.

Similar candidates' estimates are wrong by similar factors: each estimate is corrected
by the error factor of the most similar candidate compiled so far. The next candidate is
the one that would add most to the area that the Pareto set dominates (the hypervolume
indicator; Zitzler and Thiele 1999, doi:10.1109/4235.797969).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimates import Estimate
from jshard.plan.search.outcomes import Outcome

# If no estimate adds to the Pareto front, the candidates come next that would add to it
# with time and memory this much lower.
HOPE = 0.95


class Choice:
    """The candidates, and what is known about them.

    Attributes:
      left: candidates not chosen yet.
      chosen: the others, in the order of choice.
    """

    def __init__(self, estimates: Mapping[Candidate, Estimate], usable: int):
        """Starts with nothing chosen. A program may use ``usable`` bytes of memory."""
        self.estimates, self.usable = estimates, usable
        self.left, self.chosen = list(estimates), list[Candidate]()
        # Of the chosen ones: the estimate, then the measured figures.
        self.known: dict[Candidate, Estimate] = {}
        # The nearest outcome's distance, and its error factors.
        self.corrections: dict[Candidate, tuple[tuple[int, int], Estimate]] = {}

    def first(self, limit: int) -> Iterator[Candidate]:
        """Yields up to ``limit`` candidates, each by what is known at that time."""
        while self.left and len(self.chosen) < limit:
            best = self.left[0]
            if self.chosen or best.settings:  # the config as given is compiled first
                front = _front(self.known.values(), self.usable)
                best = max(self.left, key=lambda c: self._promise(c, front))
            self.left.remove(best)
            self.chosen.append(best)
            self.known[best] = self.corrected(best)
            yield best

    def learn(self, outcome: Outcome) -> None:
        """Records an outcome, and corrects the estimates of its neighbours."""
        new, guess = outcome.candidate, self.estimates[outcome.candidate]
        if outcome.error:
            del self.known[new]
            return
        found = self.known[new] = Estimate(outcome.seconds, outcome.memory)
        error = Estimate(found.seconds / guess.seconds, found.memory / guess.memory)
        for candidate in self.left:
            distance = _distance(candidate, new)
            before = self.corrections.get(candidate)
            if before is None or distance < before[0]:
                self.corrections[candidate] = distance, error

    def corrected(self, candidate: Candidate) -> Estimate:
        """Returns the estimate times the error factor of the nearest outcome."""
        guess = self.estimates[candidate]
        if candidate not in self.corrections:
            return guess
        _, error = self.corrections[candidate]
        return Estimate(guess.seconds * error.seconds, guess.memory * error.memory)

    def _promise(
        self, candidate: Candidate, front: Sequence[Estimate]
    ) -> tuple[float, float]:
        guess = self.corrected(candidate)
        hoped = Estimate(HOPE * guess.seconds, HOPE * guess.memory)
        return _gain(front, guess, self.usable), _gain(front, hoped, self.usable)


def _distance(a: Candidate, b: Candidate) -> tuple[int, int]:
    """Returns how many keys differ; if equal, more shared settings are nearer."""
    differ = sum(
        a.settings.get(key) != b.settings.get(key) for key in a.settings | b.settings
    )
    return differ, -len(a.settings.items() & b.settings.items())


def _front(known: Iterable[Estimate], usable: int) -> list[Estimate]:
    """Returns the Pareto front of the points that fit, fastest first."""
    front: list[Estimate] = []
    for point in sorted(known, key=lambda e: (e.seconds, e.memory)):
        if point.memory <= (front[-1].memory - 1 if front else usable):
            front.append(point)
    return front


def _gain(front: Sequence[Estimate], new: Estimate, usable: int) -> float:
    """Returns the area (steps/s times free bytes) that a point adds to a front's."""
    rate, slower, gain = 1 / new.seconds, 0.0, 0.0
    for point in reversed(front):  # the least memory known up to its speed
        speed = min(1 / point.seconds, rate)
        gain += (speed - slower) * max(0.0, point.memory - new.memory)
        slower = speed
    return gain + (rate - slower) * max(0.0, usable - new.memory)
