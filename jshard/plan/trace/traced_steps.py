"""The operations of a program in a profile, by step and device."""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jshard.plan.cost.transfers import KINDS
from jshard.plan.hlo import Instruction, Module
from jshard.plan.trace.profile_reader import (
    DISPATCH,
    Operation,
    Profile,
    refuse_nameless,
)
from jshard.system.errors import UserError

# These have other instructions inside, which have events of their own.
_AROUND = ("while", "conditional", "call")
_RUNS = ("fusion", "dot", "convolution", *KINDS)  # always with an event
_MOST_MISSING = 0.1  # of the instructions that run once, in a step that is whole
# Of names, in a trace of this program. Beside a plan for absent GPUs less is known: XLA
# chooses kernels by measuring them. The very program has all names of its trace.
_LEAST_KNOWN = {False: 0.5, True: 0.99}
_LEAST_FOUND = 0.5


class Place(NamedTuple):
    """One execution of an instruction within a step."""

    name: str  # of the instruction
    turn: int  # how often it ran before in this step


Ran = Mapping[Place, Operation]  # of one device in one step, in order of time


class Steps(NamedTuple):
    """What ran of a program: whole steps on all devices."""

    program: str  # its module
    numbers: tuple[int, ...]  # of the steps, as annotated, or from 0
    ran: tuple[Mapping[int, Ran], ...]  # by step, by device
    dispatched: tuple[Mapping[int, float], ...]  # when by each host; empty if unknown
    others: Mapping[
        int, Sequence[tuple[str, Operation]]
    ]  # of other programs, by device
    notes: tuple[str, ...]  # what was left out, and why

    @property
    def devices(self) -> tuple[int, ...]:
        """Their numbers."""
        return tuple(self.ran[0])


def find_steps(
    module: Module,
    name: str,
    number: int,
    near: int,
    profile: Profile,
    *,
    same_devices: bool,
) -> Steps:
    """Finds a program in a profile, and cuts it into steps.

    A step is a run of the program where the profile names runs (CPUs do). Elsewhere it
    begins with the first instruction that runs once per step.

    Args:
      module: the program.
      name: of its module, "jit_train_step".
      number: of its devices.
      near: devices of a host.
      same_devices: whether the program was compiled for devices like the profile's
        that are there, so that a profile of it knows all its instructions.
      profile: what ran.

    Raises:
      UserError: the profile has another program, too few or too many devices, or no
        whole step.
    """
    key = _key(module, name, profile, same_devices=same_devices)
    devices = {
        device: [x for x in map(_started(module), found) if x is not None]
        for device, found in sorted(profile.programs[key].items())
    }
    notes = list(_count_devices(profile, len(devices), number, near))
    if profile.nameless:
        notes.append(
            f"{profile.nameless} kernels have no names of instructions, as in command "
            "buffers: what they did is missing below"
        )
    once = _once(module, {x.name for found in devices.values() for x in found})
    runs = {device: _runs(found, once) for device, found in devices.items()}
    if len({len(found) for found in runs.values()}) > 1:
        most = min(map(len, runs.values()))
        notes.append(f"steps after the first {most} are not on all devices: left out")
    steps = [
        dict(zip(runs, step, strict=True)) for step in zip(*runs.values(), strict=False)
    ]
    whole = [_is_whole(step, once) for step in steps]
    if not any(whole):
        refuse_nameless(profile)
        raise UserError(
            f"--profile={profile.path}: no step of {name} is whole: the trace was cut "
            "off; trace complete steps: wait for the devices before it begins and "
            "before it ends (jax.block_until_ready)"
        )
    labels = _labels(profile, len(steps))
    for label, complete in zip(labels, whole, strict=True):
        if not complete:
            notes.append(f"step {label} is cut off: left out")
    kept = [i for i, complete in enumerate(whole) if complete]
    dispatched = _dispatched(profile, name, len(steps))
    placed = functools.partial(_placed, places={})
    return Steps(
        name,
        tuple(labels[i] for i in kept),
        tuple({d: placed(found) for d, found in steps[i].items()} for i in kept),
        tuple(dispatched[i] for i in kept),
        _others(profile, key),
        tuple(notes),
    )


def _key(
    module: Module, name: str, profile: Profile, *, same_devices: bool
) -> tuple[str, int]:
    """Returns the program of the profile that is this one.

    Raises:
      UserError: none is.
    """
    same = {key: ran for key, ran in profile.programs.items() if key[0] == name}
    if not same:
        listed = ", ".join(sorted({key[0] for key in profile.programs}))
        raise UserError(
            f"--profile={profile.path}: this is a trace of {listed}, and the plan is "
            f"one of {name}: trace the program that is planned"
        )
    key = max(same, key=lambda key: sum(map(len, same[key].values())))
    names = {x.name for found in same[key].values() for x in found}
    known = sum(name in module.instructions for name in names) / len(names)
    wanted = {x.name for x in _reached(module) if _always_runs(x)}
    found = len(wanted & names) / max(len(wanted), 1)
    if known < _LEAST_KNOWN[same_devices] or found < _LEAST_FOUND:
        refuse_nameless(profile)
        raise UserError(
            f"--profile={profile.path}: this is a trace of another {name}: of its "
            f"instructions {known:.0%} are in the planned program, and of the plan's "
            f"{found:.0%} are in the trace; plan with the run's keys, mesh and JAX"
        )
    return key


def _count_devices(
    profile: Profile, traced: int, number: int, near: int
) -> Iterator[str]:
    """Yields a note if the trace has some hosts alone.

    Raises:
      UserError: it has fewer devices of a host, or more than the program.
    """
    if traced == number:
        return
    if traced < number and traced % near == 0:
        yield f"the trace has {traced} of the {number} devices"
        return
    raise UserError(
        f"--profile={profile.path}: the trace has {traced} devices, and the plan "
        f"{number}: plan the run's mesh, or trace all devices of a host"
    )


def _started(module: Module) -> Callable[[Operation], Operation | None]:
    """Returns a function that names an operation as the plan does; None around others.

    The kernel of an asynchronous instruction may have the name of what it wraps.
    """
    wrapped = {
        next(module.inside(x)).root.name: x.name
        for x in module.instructions.values()
        if x.opcode == "async-start"
    }

    def name(x: Operation) -> Operation | None:
        found = module.instructions.get(x.name)
        if found is not None and found.opcode in _AROUND:
            return None
        return x._replace(name=wrapped[x.name]) if x.name in wrapped else x

    return name


def _once(module: Module, names: set[str]) -> list[str]:
    """Returns the instructions that run once per step, in the plan's order."""
    found = module.entry.instructions
    return [x.name for x in found if x.name in names or _always_runs(x)]


def _always_runs(x: Instruction) -> bool:
    return x.opcode.removesuffix("-start") in _RUNS


def _reached(module: Module) -> Iterator[Instruction]:
    """Yields the instructions of the entry, and of the loops in it."""
    for x in module.entry.instructions:
        yield x
        if x.opcode == "while":
            yield from module.body(x).instructions


def _runs(found: list[Operation], once: list[str]) -> list[list[Operation]]:
    """Cuts the operations of a device into steps, in order of time."""
    if all(x.run is not None for x in found):
        by_run = collections.defaultdict[int | None, list[Operation]](list)
        for x in found:
            by_run[x.run].append(x)
        return list(by_run.values())
    names = {x.name for x in found}
    first = next((name for name in once if name in names), None)
    steps: list[list[Operation]] = [[]]
    for x in found:
        if x.name == first:
            steps.append([])
        steps[-1].append(x)
    return [step for step in steps if step]


def _is_whole(step: Mapping[int, Sequence[Operation]], once: list[str]) -> bool:
    for found in step.values():
        names = {x.name for x in found}
        runs = [name in names for name in once]
        ends = (runs[:2], runs[-2:])  # which is cut off; elsewhere it may be missing
        if runs.count(False) > _MOST_MISSING * len(runs) or [False, False] in ends:
            return False
    return True


def _placed(found: Sequence[Operation], places: dict[Place, Place]) -> Ran:
    turns: collections.Counter[str] = collections.Counter()
    placed = {}
    for x in found:
        place = Place(x.name, turns[x.name])
        placed[places.setdefault(place, place)] = x  # one object for all steps
        turns[x.name] += 1
    return placed


def _labels(profile: Profile, count: int) -> list[int]:
    """Returns the numbers of steps: the annotated ones, if they are as many."""
    marked = [number for number, _ in sorted(profile.marks, key=lambda x: x[1])]
    return marked if len(marked) == count else list(range(count))


def _dispatched(profile: Profile, name: str, count: int) -> list[dict[int, float]]:
    """Returns when each host started each step; {} if it is not known."""
    found: list[dict[int, float]] = [{} for _ in range(count)]
    for host, events in profile.host.items():
        starts = [x.start for x in events if x.name.endswith(f"{DISPATCH}{name})")]
        if len(starts) == count:
            for step, start in zip(found, starts, strict=True):
                step[host] = start
    return found


def _others(
    profile: Profile, key: tuple[str, int]
) -> dict[int, list[tuple[str, Operation]]]:
    found = collections.defaultdict[int, list[tuple[str, Operation]]](list)
    for (name, number), devices in profile.programs.items():
        for device, operations in devices.items():
            if (name, number) != key:
                found[device] += [(name, x) for x in operations]
    return dict(found)
