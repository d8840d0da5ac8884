"""What a search found."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jshard.plan.search.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of compiling a candidate, or what is estimated of it."""

    candidate: Candidate
    seconds: float = 0.0  # of a step
    exposed: float = 0.0  # seconds of it in which kernels wait for collectives
    rate: float = 0.0  # tokens (or examples) per second on all devices
    mfu: float | None = None  # if the recipe states its FLOPs
    memory: int = 0  # bytes on one device
    host: int = 0  # bytes of host memory for one device
    usable: int = 0  # bytes of the card that a program may use
    range: tuple[float, float] | None = None  # of the step, if runs confirm its kind
    kind: str = ""  # what these runs must have been: "bf16 on H100"
    cached: bool = False  # whether the result came from the cache
    error: str = ""  # why there are no figures
    estimated: bool = False  # by arithmetic, as nothing was compiled

    @property
    def fits(self) -> bool:
        """Whether it compiled and fits the card."""
        return not self.error and self.memory <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """Returns it as data for JSON."""
        return dataclasses.asdict(self) | {"fits": self.fits}


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search."""

    topology: str
    unit: str  # "tokens" or "examples"
    usable: int  # bytes of a card that a program may use
    outcomes: list[Outcome]  # of what was compiled, in order of completion
    considered: int  # the number of all candidates
    refused: list[tuple[Candidate, str]]  # invalid candidates, with the reason
    too_large: list[tuple[Candidate, int]]  # with a lower bound of their bytes
    untried: list[Candidate]  # beyond the limit
    warnings: list[str]  # for the user, without duplicates

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
            "outcomes": [outcome.as_dict() for outcome in self.outcomes],
            "pareto": [outcome.as_dict() for outcome in self.best],
        }


def pareto(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Returns the Pareto set of speed and memory of those that fit, fastest first."""
    fitting = [outcome for outcome in outcomes if outcome.fits]
    best: list[Outcome] = []
    for outcome in sorted(fitting, key=lambda o: (-o.rate, o.memory, o.host)):
        if not best or outcome.memory < best[-1].memory:
            best.append(outcome)
    return best
