"""What a search found."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jshard.plan.search.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of compiling a candidate.

    Attributes:
      candidate: what was compiled.
      seconds: of a step.
      exposed: seconds of the step in which kernels wait for collectives.
      rate: tokens (or examples) per second on all devices.
      mfu: model FLOPs utilisation, if the recipe states its FLOPs.
      memory: bytes on one device.
      host: bytes of host memory for one device.
      usable: bytes of the card that a program may use.
      cached: whether the result came from the cache.
      error: why there are no figures; empty if there are.
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
        """Whether it compiled and fits the card."""
        return not self.error and self.memory <= self.usable


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      topology: as given.
      unit: "tokens" or "examples".
      usable: bytes of a card that a program may use.
      outcomes: of the candidates that were compiled, in order of completion.
      considered: the number of all candidates.
      refused: invalid candidates, each with the reason.
      too_large: candidates that cannot fit, each with a lower bound of its bytes.
      untried: candidates beyond the limit.
      warnings: for the user, without duplicates.
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
        """Candidates that did not compile."""
        return [outcome for outcome in self.outcomes if outcome.error]

    @property
    def best(self) -> list[Outcome]:
        """The Pareto set, fastest first."""
        return pareto(self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the search as data for JSON."""
        return dataclasses.asdict(self) | {
            "outcomes": list(map(_as_dict, self.outcomes)),
            "pareto": list(map(_as_dict, self.best)),
        }


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    return dataclasses.asdict(outcome) | {"fits": outcome.fits}


def pareto(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Returns the Pareto set of speed and memory of those that fit, fastest first."""
    fitting = [outcome for outcome in outcomes if outcome.fits]
    best: list[Outcome] = []
    for outcome in sorted(fitting, key=lambda o: (-o.rate, o.memory, o.host)):
        if not best or outcome.memory < best[-1].memory:
            best.append(outcome)
    return best
