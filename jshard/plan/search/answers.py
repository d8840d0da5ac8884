"""Which GPUs, how many, how long and how much: the best way to train on each."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimated import Estimated
from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.prices import Prices
from jshard.plan.topology import parse
from jshard.system.errors import UserError

DAY = 86_400.0  # seconds
NO_PRICES = Prices({})
_RANGE = re.compile(r"(?P<gpu>.+):(?P<low>\d*)(?P<to>\.\.(?P<high>\d*))?")
_FROM, _TO = 8, 1024  # of "h100:.."
_SLACK = 1.1  # between what an estimate and a compiled step say of two topologies


class Answer(NamedTuple):
    """The fastest way to train on one topology that fits."""

    topology: str  # "h100:64"
    gpus: int
    best: Outcome | None  # None if nothing fits, or no mesh is possible
    why: str = ""  # if so
    # (expected, least, most); the last two are alike where no run confirms the step.
    days: tuple[float, float, float] = (0.0, 0.0, 0.0)
    price: float | None = None  # of a GPU for an hour

    @property
    def kind(self) -> str:
        """The GPU, as it was asked for: "h100"."""
        return self.topology.rpartition(":")[0]

    @property
    def gpu_hours(self) -> float:
        """The hours of all GPUs."""
        return self.days[0] * 24 * self.gpus

    @property
    def cost(self) -> tuple[float, float, float] | None:
        """What they cost, as `days`; None without a price."""
        if self.price is None:
            return None
        an_hour = self.price * self.gpus
        days, least, most = self.days
        return 24 * days * an_hour, 24 * least * an_hour, 24 * most * an_hour


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of each topology.

    Attributes:
      amount: how many tokens (or examples) to train on.
      prices: of the GPUs.
      days: the most that training may take; None if it may take any.
      budget: the most that it may cost, likewise.
    """

    amount: float
    prices: Prices = NO_PRICES
    days: float | None = None
    budget: float | None = None

    def answer(self, found: Search) -> Answer:
        """Returns the answer of a search."""
        _, number = parse(found.topology)
        fitting = [outcome for outcome in found.outcomes if outcome.fits]
        if not fitting:
            return Answer(found.topology, number, None, _reason(found))
        best = max(fitting, key=lambda outcome: outcome.rate)
        days = self.amount / best.rate / DAY
        low, high = best.range or (best.seconds, best.seconds)
        times = days, days * low / best.seconds, days * high / best.seconds
        price = self.prices.of(found.topology)
        return Answer(found.topology, number, best, days=times, price=price)

    def estimate(self, found: Estimated, measure: float = 1.0) -> Answer:
        """Returns the answer of estimates, their seconds times ``measure``."""
        _, number = parse(found.topology)
        order = found.fastest()
        if not order:
            return Answer(found.topology, number, None, _no_estimate(found))
        rate, memory = found.rate(order[0]) / measure, found.estimates[order[0]].memory
        seconds = found.estimates[order[0]].seconds * measure
        best = Outcome(
            order[0],
            seconds=seconds,
            rate=rate,
            memory=int(memory),
            usable=found.gpu.usable,
            estimated=True,
        )
        days, price = self.amount / rate / DAY, self.prices.of(found.topology)
        times = days, days, days
        return Answer(found.topology, number, best, days=times, price=price)

    def allows(self, answer: Answer) -> bool:
        """Whether an answer is in time and within the budget, as far as is known."""
        if answer.best is None:
            return False
        late = self.days is not None and answer.days[0] > self.days
        cost = answer.cost
        dear = self.budget is not None and cost is not None and cost[0] > self.budget
        return not late and not dear


def front(question: Question, answers: Iterable[Answer]) -> list[Answer]:
    """Returns those that no other beats in both days and cost, the fastest first.

    Without prices, cost is hours of GPUs, and an answer is beaten by those of the same
    kind alone. What is only estimated is none of them.
    """
    found = [answer for answer in answers if question.allows(answer)]
    found = [answer for answer in found if answer.best and not answer.best.estimated]
    unbeaten = [x for x in found if not any(_beats(y, x) for y in found)]
    return sorted(unbeaten, key=lambda answer: answer.days[0])


def worth_compiling(question: Question, answers: Iterable[Answer]) -> list[str]:
    """Returns the topologies whose estimates may be on the front when compiled."""
    slow = dataclasses.replace(
        question,
        days=question.days and question.days * _SLACK,
        budget=question.budget and question.budget * _SLACK,
    )
    found = [answer for answer in answers if slow.allows(answer)]
    return [x.topology for x in found if not any(_beats(y, x, _SLACK) for y in found)]


def compiled_over_estimated(
    topology: str, compiled: Mapping[str, Answer], estimates: Mapping[str, Answer]
) -> float:
    """Returns how much longer than estimated a compiled step may take on a topology.

    It is that of the nearest number of the same GPUs of which one was compiled, and
    otherwise the mean of all.
    """
    ratios = {
        spec: answer.days[0] / estimates[spec].days[0]
        for spec, answer in compiled.items()
        if answer.best and estimates[spec].best
    }
    asked = estimates[topology]
    alike = [spec for spec in ratios if estimates[spec].kind == asked.kind]
    if alike:
        distance = lambda spec: abs(math.log(estimates[spec].gpus / asked.gpus))
        return ratios[min(alike, key=distance)]
    return math.exp(statistics.fmean(map(math.log, ratios.values()))) if ratios else 1.0


def middle_of_each_kind(answers: Iterable[Answer]) -> list[str]:
    """Returns of each kind of GPU the topology in the middle of those that may fit."""
    kinds: dict[str, list[str]] = {}
    for answer in answers:
        if answer.best:
            kinds.setdefault(answer.kind, []).append(answer.topology)
    return [specs[len(specs) // 2] for specs in kinds.values()]


def _beats(x: Answer, y: Answer, margin: float = 1.0) -> bool:
    """Whether one takes fewer days and less money, each by a factor of ``margin``."""
    if (x.price is None or y.price is None) and x.kind != y.kind:
        return False  # what they cost is not in the same unit

    def dear(answer: Answer) -> float:
        return answer.gpu_hours if answer.cost is None else answer.cost[0]

    mine, other = (x.days[0] * margin, dear(x) * margin), (y.days[0], dear(y))
    return mine != other and all(a <= b for a, b in zip(mine, other, strict=True))


def topologies(text: str) -> list[str]:
    """Returns the topologies of ``"h100:8..64,h200:16,b200:.."``: numbers doubled.

    Raises:
      UserError: a part has another form, or no number that fills hosts.
    """
    found: dict[str, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or not (match["low"] or match["to"]):
            raise UserError(
                f"--topologies={text}: {part!r} is not GPU:NUMBER or GPU:FROM..TO, "
                "like h100:8..512"
            )
        low = int(match["low"] or _FROM)
        high = int(match["high"] or max(_TO, low)) if match["to"] else low
        if low < 1 or low > high:
            raise UserError(f"--topologies={text}: {part!r} begins above its end")
        found |= dict.fromkeys(f"{match['gpu']}:{n}" for n in _doubled(low, high))
    for spec in found:
        try:
            parse(spec)
        except UserError as error:
            raise UserError(f"--topologies={text}: {error}") from error
    return list(found)


def _doubled(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def _no_estimate(found: Estimated) -> str:
    """Returns in words why nothing is estimated to fit."""
    if found.error:
        return f"no step could be traced: {found.error}"
    bounds = [(x.memory, "about ") for x in found.estimates.values()]
    bounds += [(bound, "at least ") for _, bound in found.too_large]
    return _smallest(bounds, found.gpu.usable, found.refused)


def _smallest(
    needs: list[tuple[float, str]], usable: int, refused: list[tuple[Candidate, str]]
) -> str:
    if needs:
        least, how = min(needs)
        gib = f"{least / 2**30:.1f} of {usable / 2**30:.1f} GiB"
        return f"does not fit: the closest needs {how}{gib}"
    reasons = [reason for _, reason in refused]
    return f"no mesh is possible: {reasons[0]}" if reasons else "nothing to compare"


def _reason(found: Search) -> str:
    """Returns in words why nothing is possible there."""
    if found.failed and not found.too_large:
        return f"no candidate compiled: {found.failed[0].error}"
    needs = [(float(o.memory), "") for o in found.outcomes if not o.error]
    needs += [(bound, "at least ") for _, bound in found.too_large]
    return _smallest(needs, found.usable, found.refused)


def as_dict(question: Question, answers: Sequence[Answer], unit: str) -> dict[str, Any]:
    """Returns the answers as data for JSON."""
    best = {answer.topology for answer in front(question, answers)}
    rows = []
    for answer in answers:
        days, cost = answer.days, answer.cost
        known = answer.best is not None and answer.best.range is not None
        rows.append(
            {
                "topology": answer.topology,
                "gpus": answer.gpus,
                "estimated": answer.best is not None and answer.best.estimated,
                "best": answer.best and answer.best.as_dict(),
                "why": answer.why,
                "days": days[0] or None,
                "days_range": list(days[1:]) if known else None,
                "cost": cost and cost[0],
                "cost_range": list(cost[1:]) if known and cost else None,
                "gpu_hours": answer.gpu_hours,
                "pareto": answer.topology in best,
            }
        )
    return {
        "schema": 1,
        "amount": question.amount,
        "unit": unit,
        "currency": question.prices.currency,
        "prices": question.prices.source,
        "answers": rows,
    }
