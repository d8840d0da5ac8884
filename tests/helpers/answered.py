"""Searches and estimates of many topologies, with nothing compiled."""

from typing import Any

from jshard.plan.search.answers import (
    Answer,
    Question,
)
from jshard.plan.search.candidates import Candidate
from jshard.plan.search.estimated import Estimated
from jshard.plan.search.estimates import Estimate
from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.prices import Prices
from jshard.plan.topology import parse

PRICES = Prices({"h100": 2.0, "h200": 3.0}, "USD", "a contract, 2026-11-01")
DAY = 86_400


def searched(spec: str, seconds: float = 1.0, **more: Any) -> Search:
    """A search on a topology in which one of three candidates fits and is fastest."""
    _, number = parse(spec)
    speed = (2 if spec.startswith("h200") else 1) * number / (1 + number / 256)
    memory = {"h100": 60, "h200": 120}.get(spec.partition(":")[0], 10) * 2**30

    def outcome(name: str, **figures: Any) -> Outcome:
        given = {"seconds": seconds, "memory": memory, "usable": memory, "mfu": 0.4}
        candidate = Candidate({"policy.remat": name})
        return Outcome(candidate, **given | figures)

    found = [
        outcome("full", rate=8_000 * speed, range=(0.9 * seconds, 1.2 * seconds)),
        outcome("dots", rate=10_000 * speed, range=(0.9 * seconds, 1.2 * seconds)),
        outcome("none", rate=12_000 * speed, memory=memory + 1),
        outcome("names", error="Killed"),
    ]
    return Search(
        spec, "tokens", memory, **{"outcomes": found, "considered": 4, "refused": [],
        "too_large": [], "untried": [], "warnings": []} | more,
    )  # fmt: skip


def answers(question: Question, *specs: str) -> list[Answer]:
    return [question.answer(searched(spec)) for spec in specs]


def guessed(spec: str, days: float = 1.0) -> Estimated:
    """Estimates of two candidates that fit, and of one that is faster and does not."""
    gpu, number = parse(spec)
    guesses = {"full": (1.5, 1), "dots": (1.0, 2), "none": (0.5, gpu.usable + 1)}
    found = {
        Candidate({"policy.remat": name}): Estimate(days * DAY * seconds, memory)
        for name, (seconds, memory) in guesses.items()
    }
    examples = dict.fromkeys(found, 8 * number)
    return Estimated(spec, gpu, 1e3, "tokens", found, examples, 4, [], [])
