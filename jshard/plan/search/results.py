"""What a search found."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jshard.plan.search.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
      candidate: which one.
      seconds: a step.
      exposed: of these, waiting for collectives.
      rate: tokens (or examples) a second, of all devices.
      mfu: model FLOPs utilisation, where the recipe tells its FLOPs.
      memory: bytes of one device.
      host: bytes of host memory for one device.
      usable: bytes of the card that a program may use.
      cached: whether it had been compiled before.
      error: why there are no figures; empty where there are.
    """

    candidate: Candidate
    seconds: float = 0.0
    exposed: float = 0.0
    rate: float = 0.0
    mfu: float | None = None
    memory: int = 0
    host: int = 0
    usable: int = 0
    cached: bool = False
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether it has figures, and the card's memory suffices."""
        return not self.error and self.memory <= self.usable


@dataclasses.dataclass(frozen=True)
class Search:
    """A search, done.

    Attributes:
      topology: as given.
      unit: "tokens" or "examples".
      usable: bytes of a card that a program may use.
      outcomes: of what was compiled (or failed to), as it came.
      considered: how many candidates there were.
      refused: those that cannot be, and why.
      too_large: those that cannot fit, and bytes that they need at least.
      untried: those beyond the limit, the best estimate first.
      warnings: to tell the user, once each.
    """

    topology: str
    unit: str
    usable: int
    outcomes: list[Outcome]
    considered: int
    refused: list[tuple[Candidate, str]]
    too_large: list[tuple[Candidate, int]]
    untried: list[Candidate]
    warnings: list[str]

    @property
    def failed(self) -> list[Outcome]:
        """Those that did not compile."""
        return [outcome for outcome in self.outcomes if outcome.error]

    @property
    def best(self) -> list[Outcome]:
        """The Pareto set, the fastest first."""
        return pareto(self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        outcomes = [_as_dict(outcome) for outcome in self.outcomes]
        return dataclasses.asdict(self) | {
            "outcomes": outcomes,
            "pareto": [_as_dict(outcome) for outcome in self.best],
        }


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return dataclasses.asdict(outcome) | {"fits": outcome.fits}


def pareto(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Of those that fit, the ones no other beats in speed or in memory.

    Returns:
      Them, the fastest first; of equals one.
    """
    fitting = sorted(
        (o for o in outcomes if o.fits), key=lambda o: (-o.rate, o.memory, o.host)
    )
    best: list[Outcome] = []
    for outcome in fitting:
        if not best or outcome.memory < best[-1].memory:
            best.append(outcome)
    return best
