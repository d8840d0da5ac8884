"""What is estimated of all candidates on a topology, in memory and in a file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.plan.fit.hardware import GPU
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimates import Estimate
from jshard.plan.search.result_cache import hash_of, read_result, write_result

_ALIKE = 0.02  # a part of a step's time that an estimate cannot tell


@dataclasses.dataclass(frozen=True)
class Estimated:
    """The candidates on a topology, before any is compiled."""

    topology: str
    gpu: GPU
    items: float  # tokens (or examples) of an example
    unit: str  # "tokens" or "examples"
    estimates: dict[Candidate, Estimate]  # of what may fit
    examples: dict[Candidate, int]  # in a step
    considered: int  # the number of all candidates
    refused: list[tuple[Candidate, str]]  # invalid candidates, with the reason
    too_large: list[tuple[Candidate, int]]  # with a lower bound of their bytes
    error: str = ""  # why no step was traced, so that estimates have no tokens
    key: str = ""  # of all that determines what a candidate compiles to, if known

    def rate(self, candidate: Candidate) -> float:
        """Returns the estimated tokens (or examples) per second on all devices."""
        seconds = self.estimates[candidate].seconds
        return self.examples[candidate] * self.items / seconds

    def fastest(self) -> list[Candidate]:
        """Returns those that are estimated to fit, the fastest first.

        Of those as fast as an estimate can tell, what changes the fewest settings; and
        before all, the fastest without a further axis of the mesh or host memory.
        """
        if self.error:
            return []
        fit = [c for c, x in self.estimates.items() if x.memory <= self.gpu.usable]

        def order(candidate: Candidate) -> tuple[int, int, int, float]:
            settings, rate = candidate.settings, self.rate(candidate)
            alike = round(math.log(rate) / _ALIKE)
            micro = int(settings.get("policy.accumulate", 1))
            return -alike, len(settings), micro, -rate

        found = sorted(fit, key=order)
        # What further axes and hosts exchange is estimated worst.
        plain = next((x for x in found if x.is_plain), found[0] if found else None)
        return sorted(found, key=lambda candidate: candidate is not plain)

    def key_of(self, candidate: Candidate) -> str:
        """Returns the key of what this candidate compiles to, in the cache."""
        return hash_of({"of": self.key, "settings": candidate.settings})


def read_estimated(
    folder: Path,
    topology: str,
    gpu: GPU,
    allowed: Mapping[str, Sequence[Any] | None],
    key: str,
) -> Estimated | None:
    """Returns what was estimated of these candidates before, or None."""
    found = read_result(folder, _key(key, allowed))
    if found is None:
        return None
    rows = [(Candidate(settings), *row) for settings, *row in found["estimates"]]
    return Estimated(
        topology,
        gpu,
        found["items"],
        found["unit"],
        {candidate: Estimate(*row[:2]) for candidate, *row in rows},
        {candidate: row[2] for candidate, *row in rows},
        found["considered"],
        [(Candidate(settings), why) for settings, why in found["refused"]],
        [(Candidate(settings), bound) for settings, bound in found["too_large"]],
        key=key,
    )


def write_estimated(
    folder: Path, found: Estimated, allowed: Mapping[str, Sequence[Any] | None]
) -> None:
    """Writes estimates for the next question; warns if that is not possible."""
    result = {
        "items": found.items,
        "unit": found.unit,
        "considered": found.considered,
        "estimates": [
            (x.settings, *made, found.examples[x])
            for x, made in found.estimates.items()
        ],
        "refused": [(x.settings, why) for x, why in found.refused],
        "too_large": [(x.settings, bound) for x, bound in found.too_large],
    }
    write_result(folder, _key(found.key, allowed), result)


def _key(key: str, allowed: Mapping[str, Sequence[Any] | None]) -> str:
    return hash_of({"of": key, "allowed": [*allowed.items()]})
