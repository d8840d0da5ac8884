"""Which GPUs, how many, how long and how much: the best way to train on each."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.prices import Prices
from jshard.plan.topology import parse
from jshard.system.errors import UserError

DAY = 86_400.0  # seconds
NO_PRICES = Prices({})
_RANGE = re.compile(r"(?P<gpu>.+):(?P<low>\d*)(?P<to>\.\.(?P<high>\d*))?")
_FROM, _TO = 8, 1024  # of "h100:.."


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
    kind alone.
    """

    def dear(answer: Answer) -> float:
        return answer.gpu_hours if answer.cost is None else answer.cost[0]

    found = [answer for answer in answers if question.allows(answer)]
    return sorted(
        (
            x
            for x in found
            if not any(
                _comparable(x, y)
                and y.days[0] <= x.days[0]
                and dear(y) <= dear(x)
                and (y.days[0], dear(y)) != (x.days[0], dear(x))
                for y in found
            )
        ),
        key=lambda answer: answer.days[0],
    )


def _comparable(x: Answer, y: Answer) -> bool:
    """Whether what two cost is in the same unit."""
    if x.price is None or y.price is None:
        return x.kind == y.kind
    return True


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


def _reason(found: Search) -> str:
    """Returns in words why nothing is possible there."""
    if found.failed and not found.too_large:
        return f"no candidate compiled: {found.failed[0].error}"
    needs = [(o.memory, "") for o in found.outcomes if not o.error]
    needs += [(bound, "at least ") for _, bound in found.too_large]
    if needs:
        least, how = min(needs)
        gib = f"{least / 2**30:.1f} of {found.usable / 2**30:.1f} GiB"
        return f"does not fit: the closest needs {how}{gib}"
    reasons = [reason for _, reason in found.refused]
    return f"no mesh is possible: {reasons[0]}" if reasons else "nothing to compare"


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
