"""Why a device was idle: what its host, or another program, did meanwhile."""

from typing import NamedTuple

import numpy as np

from jshard.plan.trace.deviations import HOST, LATE, Deviation
from jshard.plan.trace.measured import BEGIN
from jshard.plan.trace.profile_reader import HostEvent, Profile
from jshard.plan.trace.traced_steps import Steps

_STEP = "step"  # jshard's annotation, around all that a host does for a step


class Idle(NamedTuple):
    """The cause of a late start, and in words what went on."""

    cause: str  # `HOST` or `LATE`
    during: str


class HostWork(NamedTuple):
    """What a host did besides making steps, and when, in seconds: arrays for speed."""

    events: list[HostEvent]
    starts: np.ndarray
    ends: np.ndarray


def host_work(profile: Profile) -> dict[int, HostWork]:
    """Returns what each host did, by its number."""
    found = {}
    for host, events in profile.host.items():
        events = [event for event in events if event.name != _STEP]
        starts = np.array([event.start for event in events])
        ends = np.array([event.end for event in events])
        found[host] = HostWork(events, starts, ends)
    return found


def explain(
    x: Deviation, steps: Steps, profile: Profile, work: dict[int, HostWork]
) -> Idle:
    """Says why something started late; ``work`` is what ``host_work`` returns.

    The host is the cause if it dispatched the step in the second half of the idle time
    or later; in a step, where the profile names no runs (GPUs), if something on it
    covers half of that time.
    """
    begin, end = x.at, x.took.start
    for name, other in steps.others.get(x.device, ()):
        if _overlap(other.start, other.end, begin, end) > (end - begin) / 2:
            return Idle(LATE, f"{name} ran there")
    host = profile.host_of.get(x.device, 0)
    done = work.get(host, HostWork([], np.zeros(0), np.zeros(0)))
    dispatched = steps.dispatched[x.step].get(host)
    if x.place == BEGIN and dispatched is not None:
        if dispatched - begin < (end - begin) / 2:
            return Idle(LATE, "its host had started the step in time")
        found = _innermost(done, begin, min(dispatched, end))
        return Idle(HOST, f"its host was {_in(found)}")
    on_gpu = all(op.run is None for op in steps.ran[x.step][x.device].values())
    found = _innermost(done, begin, end) if on_gpu or x.place == BEGIN else None
    if found is not None:
        return Idle(HOST, f"its host was {_in(found)}")
    return Idle(LATE, "nothing in the trace ran instead")


def _innermost(work: HostWork, begin: float, end: float) -> HostEvent | None:
    """Returns the shortest event that covers half of a time."""
    covered = np.minimum(work.ends, end) - np.maximum(work.starts, begin)
    (found,) = np.nonzero(covered >= (end - begin) / 2)
    covering = (work.events[i] for i in found)
    return min(covering, key=lambda event: event.end - event.start, default=None)


def _in(event: HostEvent | None) -> str:
    if event is None:
        return "in Python, in nothing that the trace names"
    return f"in {event.name.removeprefix('$')}"


def _overlap(start: float, end: float, begin: float, stop: float) -> float:
    return min(end, stop) - max(start, begin)
