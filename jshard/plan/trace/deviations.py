"""Where a step deviated from what was expected, by cause."""

import collections
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jshard.plan.hlo import Module
from jshard.plan.trace.measured import BEGIN, Took, kind_of
from jshard.plan.trace.traced_steps import Place

SLOW_KERNEL = "kernel slower"
SLOW_COLLECTIVE = "collective slower"
LATE = "started late"
STRAGGLER = "waited for a straggler"
NOT_OVERLAPPED = "not overlapped"
MISSING, EXTRA = "missing", "extra"
HOST = "idle device with host work"
CAUSES = (
    SLOW_KERNEL, SLOW_COLLECTIVE, LATE, STRAGGLER, NOT_OVERLAPPED, MISSING, EXTRA, HOST
)  # fmt: skip
_MEASURES = ("seconds", "idle", "exposed", "wait")
_SPREADS = 5  # median deviations from the median that are noise
_TENTH = 0.1  # of what is expected: less is no deviation
_LEAST = {True: 2e-6, False: 20e-6}  # seconds, beside a plan and without one


class Expected(NamedTuple):
    """What an operation should take, in seconds, and what is noise of each."""

    took: Took
    noise: Mapping[str, float]

    def excess(self, took: Took, measure: str) -> float:
        """Returns by how much more it took; 0 if that is noise."""
        more = getattr(took, measure) - getattr(self.took, measure)
        return more if more > self.noise[measure] else 0.0


class Deviation(NamedTuple):
    """One operation that went another way."""

    cause: str  # one of `CAUSES`
    step: int  # its place in the steps
    device: int
    place: Place
    at: float  # when it began, in seconds of the trace
    seconds: float  # by how much
    took: Took  # what was measured; of what is missing, what was expected
    expected: Took | None  # None of what is extra


Measured = Mapping[int, Mapping[Place, Took]]  # of a step, by device


def as_planned(ran: Mapping[Place, Took]) -> dict[Place, Expected]:
    """Expects of every device what the plan says."""
    least = _LEAST[True]
    return {
        place: Expected(
            took,
            {"seconds": max(least, _TENTH * took.seconds)}
            | dict.fromkeys(("idle", "exposed", "wait"), least),
        )
        for place, took in ran.items()
    }


def as_usual(steps: Sequence[Measured]) -> dict[Place, Expected]:
    """Expects of every step and device the median of all of them (the lower one)."""
    found: dict[Place, list[Took]] = collections.defaultdict(list)
    for step in steps:
        for ran in step.values():
            for place, took in ran.items():
                found[place].append(took)
    expected = {}
    for place, all_of_it in found.items():
        took, noise = all_of_it[0], {}
        for name in _MEASURES:
            values = [getattr(x, name) for x in all_of_it]
            middle = statistics.median_low(values)
            spread = statistics.median_low([abs(x - middle) for x in values])
            noise[name] = max(_LEAST[False], _TENTH * middle, _SPREADS * spread)
            took = took._replace(**{name: middle})
        expected[place] = Expected(took, noise)
    return expected


def medians(steps: Sequence[Measured], number: int) -> Measured:
    """Returns one of the steps, with each time the (lower) median over all of them."""
    found = {}
    for device, ran in steps[number].items():
        found[device] = {}
        for place, took in ran.items():
            all_of_it = [step[device][place] for step in steps if place in step[device]]
            values = {
                name: statistics.median_low([getattr(x, name) for x in all_of_it])
                for name in _MEASURES
            }
            found[device][place] = took._replace(**values)
    return found


def deviations(
    module: Module,
    steps: Sequence[Measured],
    expected: Mapping[Place, Expected],
    *,
    by_plan: bool,
) -> Iterator[Deviation]:
    """Yields the deviations of all steps and devices, in no order.

    What is expected to run at all is what the plan has (`by_plan`), or else what runs
    on a device in more than half of the steps.
    """
    present: dict[int, collections.Counter[Place]] = {
        device: collections.Counter() for device in steps[0]
    }
    for step in steps:
        for device, ran in step.items():
            present[device].update(ran.keys())  # of a dict it would add values
    usual = {
        device: {place for place, n in counts.items() if 2 * n > len(steps)}
        for device, counts in present.items()
    }
    for number, step in enumerate(steps):
        for device, ran in step.items():
            due = expected.keys() if by_plan else usual[device]
            known = [place for place in ran if place in due]
            found = [
                found
                for place in known
                for found in _of(module, number, device, place, ran, expected)
            ]
            yield from _unexplained(found)
            for place in ran.keys() - due - {BEGIN}:
                x = ran[place]
                yield Deviation(
                    EXTRA, number, device, place, x.start, x.end - x.start, x, None
                )
            end = max(x.end for x in ran.values())
            for place in due - ran.keys() - {BEGIN}:
                wanted = expected[place].took
                yield Deviation(
                    MISSING, number, device, place, end, wanted.seconds, wanted, wanted
                )


def _of(
    module: Module,
    step: int,
    device: int,
    place: Place,
    ran: Mapping[Place, Took],
    expected: Mapping[Place, Expected],
) -> Iterator[Deviation]:
    """Yields the deviations of one operation."""
    took, wanted = ran[place], expected[place]
    x = module.instructions.get(place.name)
    slow = SLOW_COLLECTIVE if x and kind_of(x, module) else SLOW_KERNEL
    parts: tuple[tuple[str, str, float], ...] = (
        (NOT_OVERLAPPED, "exposed", took.ready),
        (LATE, "idle", took.start - took.idle),
        (STRAGGLER, "wait", took.start),
        (slow, "seconds", took.start + took.wait),
    )
    for cause, measure, at in parts:
        if more := wanted.excess(took, measure):
            yield Deviation(cause, step, device, place, at, more, took, wanted.took)


def _unexplained(found: Sequence[Deviation]) -> Iterator[Deviation]:
    """Leaves out waits for transfers that deviate themselves: those are counted."""
    own: dict[Place, float] = collections.defaultdict(float)
    for x in found:
        if x.cause != NOT_OVERLAPPED:
            own[x.place] += x.seconds
    for x in found:
        awaited = x.took.awaited
        if x.cause == NOT_OVERLAPPED and awaited and own[awaited] > x.seconds / 2:
            continue
        yield x
