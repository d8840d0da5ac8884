"""What each operation of a step took, and what it waited for: measured or replayed.

Kernels of a device run one after the other. What an instruction with a ``-done`` does
(a collective, a copy) runs beside them. So a kernel can start when the one before it
has ended, and it waits no longer than for the last such transfer that ends meanwhile;
what is left of the gap the device is idle. A collective moves data when the last device
of its group has come: the others wait.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jshard.plan.cost.streams import COLLECTIVES, COMPUTE, COPIES
from jshard.plan.cost.timeline import Timeline
from jshard.plan.cost.transfers import KINDS
from jshard.plan.hlo import Instruction, Module
from jshard.plan.trace.profile_reader import Operation
from jshard.plan.trace.traced_steps import Place, Ran

BEGIN = Place("", 0)  # a device begins a step; it takes no time


class Took(NamedTuple):
    """The time of one operation, in seconds."""

    ready: float  # when it could start
    start: float
    end: float
    seconds: float  # its own; of a collective, after the last device had come
    idle: float = 0.0  # before it, in which its device did nothing that it waits for
    exposed: float = 0.0  # before it, for a transfer beside the kernels
    awaited: Place | None = None  # that transfer
    wait: float = 0.0  # for the last device of its group
    last: int | None = None  # that device


class Issue(NamedTuple):
    """Where the plan issues an operation."""

    stream: str
    after: Place | None  # the last kernel before it


Order = Mapping[Place, Issue]


def kind_of(x: Instruction, module: Module) -> str:
    """Returns "all-gather" of a collective in any form, or "" of anything else."""
    if x.opcode == "async-start":
        x = next(module.inside(x)).root
    kind = x.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def planned(timeline: Timeline) -> tuple[Ran, Order]:
    """Returns a replayed step as if it had run, and the order in which it is issued."""
    turns: dict[str, int] = {}
    ran, order, last = {}, {}, None
    for event in timeline.events:
        place = Place(event.name, turns.get(event.name, 0))
        turns[event.name] = place.turn + 1
        ran[place] = Operation(event.name, event.start, event.end, None)
        order[place] = Issue(event.stream, last)
        last = place if event.stream == COMPUTE else last
    return dict(sorted(ran.items(), key=lambda x: x[1].start)), order


def measure(
    module: Module,
    step: Mapping[int, Ran],
    before: Mapping[int, float],
    order: Order,
) -> dict[int, dict[Place, Took]]:
    """Measures the operations of all devices in one step.

    Args:
      module: the program.
      step: what ran, by device.
      before: when the step before ended, by device; {} for the first.
      order: of the plan; empty without one.
    """
    began = min(min(x.start for x in ran.values()) for ran in step.values())
    found = {}
    for device, ran in step.items():
        ready = before.get(device, began)
        found[device] = _of_device(module, ran, ready, order)
    for place, arrived in _collectives(module, step).items():
        for group in _groups(module, place, list(arrived)):
            starts = {device: arrived[device].start for device in group}
            last = max(starts, key=starts.__getitem__)
            for device in group:
                x = arrived[device]
                come = min(starts[last], x.end)
                found[device][place] = found[device][place]._replace(
                    seconds=x.end - come, wait=come - x.start, last=last
                )
    return found


def _of_device(
    module: Module, ran: Ran, ready: float, order: Order
) -> dict[Place, Took]:
    """Measures the operations of one device, as if it were alone."""
    streams = {
        place: order[place].stream if place in order else _stream(module, place)
        for place in ran
    }
    # A collective without a done stands in the row of kernels.
    alone = {
        place
        for place, stream in streams.items()
        if stream == COMPUTE or not _has_done(module, place)
    }
    beside = sorted((ran[p].end, p) for p in ran if p not in alone)
    first = next(iter(ran.values())).start
    gap = max(0.0, first - ready)
    found = {BEGIN: Took(ready, first, first, 0.0, idle=gap)}
    free, ended = first, {}  # by stream
    number = 0
    for place, x in ran.items():
        if place not in alone:
            after = order[place].after if place in order else None
            previous = ended.get(streams[place], first)
            issued = ran[after].end if after and after in ran else first
            could = max(previous, issued)
            could = min(could, x.start)
            ended[streams[place]] = x.end
            took = Took(could, x.start, x.end, x.seconds, idle=x.start - could)
            found[place] = took
            continue
        awaited, arrived = None, free
        while number < len(beside) and beside[number][0] <= x.start + 1e-9:
            if beside[number][0] > free:
                arrived, awaited = min(beside[number][0], x.start), beside[number][1]
            number += 1
        idle = max(0.0, x.start - arrived)
        exposed = arrived - free if awaited else 0.0
        found[place] = Took(free, x.start, x.end, x.seconds, idle, exposed, awaited)
        free = max(free, x.end)
    return found


def _stream(module: Module, place: Place) -> str:
    x = module.instructions.get(place.name)
    if x is None or not x.opcode.endswith("-start"):
        return COMPUTE
    return COLLECTIVES if kind_of(x, module) else COPIES


def _has_done(module: Module, place: Place) -> bool:
    x = module.instructions.get(place.name)
    return x is not None and x.opcode.endswith("-start")


def _collectives(
    module: Module, step: Mapping[int, Ran]
) -> dict[Place, dict[int, Operation]]:
    """Returns the collectives by place, then by device."""
    found: dict[Place, dict[int, Operation]] = {}
    for device, ran in step.items():
        for place, operation in ran.items():
            x = module.instructions.get(place.name)
            if x is not None and kind_of(x, module):
                found.setdefault(place, {})[device] = operation
    return found


def _groups(module: Module, place: Place, devices: list[int]) -> list[list[int]]:
    """Returns the traced devices that wait for each other in a collective."""
    x = module.instructions[place.name]
    if x.opcode == "async-start":
        x = next(module.inside(x)).root
    joined: dict[int, set[int]] = {device: {device} for device in devices}
    for group in x.groups or (tuple(devices),):
        together = set[int]().union(*(joined.get(d, ()) for d in group))
        for device in together:
            joined[device] = together
    return [sorted(group) for group in {id(g): g for g in joined.values()}.values()]
