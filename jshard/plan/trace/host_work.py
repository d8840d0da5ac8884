"""Why a device was idle: what its host, or another program, did meanwhile."""

from collections.abc import Sequence
from typing import NamedTuple

from jshard.plan.trace.deviations import HOST, LATE, Deviation
from jshard.plan.trace.measured import BEGIN
from jshard.plan.trace.profile_reader import HostEvent, Profile
from jshard.plan.trace.traced_steps import Steps

_STEP = "step"  # jshard's annotation, around all that a host does for a step


class Idle(NamedTuple):
    """The cause of a late start, and in words what went on."""

    cause: str  # `HOST` or `LATE`
    during: str


def explain(x: Deviation, steps: Steps, profile: Profile) -> Idle:
    """Says why something started late.

    The host is the cause if it dispatched the step in the second half of the idle time
    or later; in a step, where the profile names no runs (GPUs), if something on it
    covers half of that time.
    """
    begin, end = x.at, x.took.start
    for name, other in steps.others.get(x.device, ()):
        if _overlap(other.start, other.end, begin, end) > (end - begin) / 2:
            return Idle(LATE, f"{name} ran there")
    host = profile.host_of.get(x.device, 0)
    events = profile.host.get(host, [])
    dispatched = steps.dispatched[x.step].get(host)
    if x.place == BEGIN and dispatched is not None:
        if dispatched - begin < (end - begin) / 2:
            return Idle(LATE, "its host had started the step in time")
        found = _innermost(events, begin, min(dispatched, end))
        return Idle(HOST, f"its host was {_in(found)}")
    on_gpu = all(op.run is None for op in steps.ran[x.step][x.device].values())
    found = _innermost(events, begin, end) if on_gpu or x.place == BEGIN else None
    if found is not None:
        return Idle(HOST, f"its host was {_in(found)}")
    return Idle(LATE, "nothing in the trace ran instead")


def _innermost(
    events: Sequence[HostEvent], begin: float, end: float
) -> HostEvent | None:
    """Returns the shortest event that covers half of a time."""
    covering = (
        event
        for event in events
        if event.name != _STEP
        and _overlap(event.start, event.end, begin, end) >= (end - begin) / 2
    )
    return min(covering, key=lambda event: event.end - event.start, default=None)


def _in(event: HostEvent | None) -> str:
    if event is None:
        return "in Python, in nothing that the trace names"
    return f"in {event.name.removeprefix('$')}"


def _overlap(start: float, end: float, begin: float, stop: float) -> float:
    return min(end, stop) - max(start, begin)
