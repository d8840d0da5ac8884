"""A comparison of a plan and a trace, in words and as data."""

from collections.abc import Iterator
from typing import Any

from jshard.plan.hlo.program_text import direction
from jshard.plan.trace import deviations
from jshard.plan.trace.comparison import Comparison
from jshard.plan.trace.deviations import Deviation
from jshard.plan.trace.measured import BEGIN, kind_of
from jshard.plan.trace.traced_steps import Place
from jshard.sharding.settings.scopes import LAYERS
from jshard.system.formatting import format_seconds

SCHEMA = 1
_LARGEST = 3  # deviations that are listed


def lines(found: Comparison) -> Iterator[str]:
    """Yields the comparison in lines of text."""
    yield from (f"{label:15} {text}" for label, text in rows(found))


def rows(found: Comparison) -> Iterator[tuple[str, str]]:
    """Yields the comparison as (label, text), without a label where one goes on."""
    numbers, devices = found.steps.numbers, found.steps.devices
    yield "TRACE", str(found.profile.path)
    yield "program", f"{found.steps.program}, {_count(len(devices), 'device')}"
    seconds = found.seconds
    span = f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"
    many = _count(len(numbers), "step")
    usual = format_seconds(found.step_seconds)
    yield "measured", f"{usual} per step ({many}: {span})"
    planned = (
        "no times for these devices: expected is the median of each operation over "
        "steps and devices"
    )
    if found.planned is not None:
        planned = f"{format_seconds(found.planned)} per step"
    if found.baseline is not None:
        planned = f"the median of each operation in {found.baseline.path}"
    yield "planned" if found.baseline is None else "expected", planned
    yield from (("note", note) for note in found.steps.notes)
    yield "first", first(found)
    if (without := found.without_first) is not None:
        yield "", f"Without it the step takes {format_seconds(without)} or more."
    for i, (cause, total) in enumerate(found.sums.items()):
        yield "" if i else "per step", f"{format_seconds(total):>9}  {cause}"
    largest = sorted(
        range(len(found.deviations)), key=lambda i: -found.deviations[i].seconds
    )
    for i, number in enumerate(largest[:_LARGEST]):
        yield "" if i else "largest", sentence(found, number)


def first(found: Comparison) -> str:
    """The first deviation in words."""
    if found.first is None:
        return "nothing deviates"
    return sentence(found, found.first)


def sentence(found: Comparison, number: int) -> str:
    """A deviation in words."""
    x = found.deviations[number]
    what, more = operation(found, x.place), format_seconds(x.seconds)
    begins = f"In step {found.steps.numbers[x.step]} "
    if found.baseline is not None:
        begins = "In the median step "
    on = f"on device {x.device}"
    if x.cause in (deviations.SLOW_KERNEL, deviations.SLOW_COLLECTIVE):
        assert x.expected is not None
        took = format_seconds(x.took.seconds)
        normal = format_seconds(x.expected.seconds)
        after = ""
        if x.cause == deviations.SLOW_COLLECTIVE:
            after = " after its last device had come"
        return f"{begins}{what} took {took} instead of {normal} {on}{after}."
    if x.cause == deviations.STRAGGLER:
        return (
            f"{begins}{what} waited {more} more {on} for device {x.took.last}, which "
            "came last."
        )
    if x.cause == deviations.NOT_OVERLAPPED:
        awaited = operation(found, x.took.awaited) if x.took.awaited else "a transfer"
        hides = "the plan" if found.planned is not None else "the usual step"
        return f"{begins}{what} waited {more} {on} for {awaited}, which {hides} hides."
    if x.cause == deviations.MISSING:
        return f"{begins}{what} did not run {on}."
    if x.cause == deviations.EXTRA:
        than = "planned" if found.planned is not None else "usual"
        return f"{begins}{what} ran {on}, once more than {than}, and took {more}."
    return f"{begins}{what} started {more} late {on}: {found.during[number]}."


def operation(found: Comparison, place: Place) -> str:
    """An operation in words: "all-gather.3 (forward, layers, turn 2 of 12)"."""
    if place == BEGIN:
        return "the program"
    x = found.module.instructions.get(place.name)
    if x is None:
        return place.name
    where = [direction(x.source)] if x.source else []
    where += [LAYERS] if f"({LAYERS})" in x.source else []
    turns = sum(other.name == place.name for other in found.expected)
    if turns > 1:
        where.append(f"turn {place.turn + 1} of {turns}")
    kind = kind_of(x, found.module) or x.source.rpartition("/")[2]
    what = place.name if place.name.startswith(kind) else f"{kind} {place.name}"
    return f"{what} ({', '.join(where)})" if where else what


def as_json(found: Comparison) -> dict[str, Any]:
    """Returns the comparison as data, in seconds."""
    return {
        "schema": SCHEMA,
        "profile": str(found.profile.path),
        "program": found.steps.program,
        "baseline": found.baseline and str(found.baseline.path),
        "planned": found.planned,
        "measured": found.step_seconds,
        "steps": [
            {"step": step, "seconds": seconds}
            for step, seconds in zip(found.steps.numbers, found.seconds, strict=True)
        ],
        "devices": list(found.steps.devices),
        "notes": list(found.steps.notes),
        "first": found.first,
        "without_first": found.without_first,
        "causes": found.sums,
        "deviations": [_one(found, i, x) for i, x in enumerate(found.deviations)],
    }


def _one(found: Comparison, number: int, x: Deviation) -> dict[str, Any]:
    return {
        "cause": x.cause,
        "step": found.steps.numbers[x.step],
        "device": x.device,
        "instruction": x.place.name,
        "turn": x.place.turn,
        "at": x.at,
        "seconds": x.seconds,
        "words": sentence(found, number),
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
