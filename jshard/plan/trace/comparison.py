"""``jshard.plan.compare``: a plan, or the usual step, beside what was measured."""

import collections
import dataclasses
import functools
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from jshard.plan import hlo
from jshard.plan.cost.timeline import Timeline
from jshard.plan.planning import Plan, make_plan
from jshard.plan.program import Program
from jshard.plan.trace import deviations
from jshard.plan.trace.deviations import (
    CAUSES,
    LATE,
    STRAGGLER,
    Deviation,
    Expected,
    Measured,
)
from jshard.plan.trace.host_work import explain, host_work
from jshard.plan.trace.measured import Order, measure, planned
from jshard.plan.trace.profile_reader import Operation, Profile, read_profile
from jshard.plan.trace.traced_steps import Place, Ran, Steps, find_steps
from jshard.system.errors import UserError

_SHARE = 0.5  # of the largest deviation: the first one that is not smaller is named
_HEADER = re.compile(r"HloModule ([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a trace shows beside what was expected.

    Attributes:
      module: the program.
      profile: what ran while it was traced.
      steps: what ran of the program.
      baseline: what it is compared with in place of a plan; None without one.
      planned: seconds of a step; None without a plan in seconds, as on CPUs, and beside
        a baseline: then the median of each operation over all steps and devices, of
        the baseline if there is one, is expected.
      expected: of each operation.
      measured: the operations of each step, by device.
      deviations: in order of time.
      during: what went on while each of the late ones was late, by its place in the
        deviations.
    """

    module: hlo.Module
    profile: Profile
    steps: Steps
    baseline: Profile | None
    planned: float | None
    expected: Mapping[Place, Expected]
    measured: tuple[Measured, ...]
    deviations: tuple[Deviation, ...]
    during: Mapping[int, str]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each step: from the end of the one before, on its last device."""
        ends = [max(_end(ran) for ran in step.values()) for step in self.steps.ran]
        first = min(_start(ran) for ran in self.steps.ran[0].values())
        return tuple(
            end - start for start, end in zip([first, *ends], ends, strict=False)
        )

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return statistics.median_low(self.seconds)

    @property
    def first(self) -> int | None:
        """Which deviation is the first in time of those that matter; None without any.

        It has at least half of the size of the largest. What waits for another device
        counts only if no device went another way itself.
        """
        found = list(enumerate(self.deviations))
        own = [(i, x) for i, x in found if x.cause != STRAGGLER] or found
        least = _SHARE * max((x.seconds for _, x in own), default=0.0)
        return next((i for i, x in own if x.seconds >= least), None)

    @property
    def shown(self) -> tuple[int, int]:
        """The step, by its place, and the device to look at first."""
        if self.first is not None:
            x = self.deviations[self.first]
            return x.step, x.device
        return self.seconds.index(self.step_seconds), self.steps.devices[0]

    @property
    def without_first(self) -> float | None:
        """The least that the step of the first deviation could have taken without it.

        Where something else is as late, it takes longer. None if nothing deviates.
        """
        if self.first is None:
            return None
        x = self.deviations[self.first]
        return max(self.seconds[x.step] - x.seconds, 0.0)

    @property
    def sums(self) -> dict[str, float]:
        """Seconds of a step on a device by cause, on average; the largest first."""
        total: dict[str, float] = collections.defaultdict(float)
        for x in self.deviations:
            total[x.cause] += x.seconds
        steps = 1 if self.baseline else len(self.steps.ran)
        count = steps * len(self.steps.devices)
        found = {cause: total[cause] / count for cause in CAUSES if total[cause]}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def compare(
    plan: Plan | Program | jax.stages.Compiled,
    profile: Profile | str | Path,
    baseline: Profile | str | Path | None = None,
) -> Comparison:
    """Compares a trace with the plan of its program, by instruction, step and device.

    Args:
      plan: A plan, the program of one, or any compiled program. Where there are no
        planned times (on CPUs, and of a compiled program), steps and devices are
        compared with each other: the median of each operation is expected.
      profile: What ``jax.profiler`` wrote: a folder, a file, or what
        ``read_profile`` read of it.
      baseline: Another profile of the program, as it should go. In place of the plan
        the medians of its operations are expected, and those of the profile are
        compared with them: what is slower in every step, and not in one.

    Raises:
      UserError: the profile cannot be read, is one of another program or of other
        devices, or has no whole step; or there is nothing to compare with.
    """
    if isinstance(plan, Program):
        plan = make_plan(plan)
    if not isinstance(profile, Profile):
        profile = read_profile(profile)
    timeline, near = None, 1
    if isinstance(plan, Plan):
        text, module, number = plan.text, plan.module, plan.devices
        timeline, gpu = plan.timeline, plan.gpu
        near = number if gpu is None else gpu.host
    else:
        text = plan.as_text() or ""
        module = hlo.parse(text)
        number = near = _devices(text)
    header = _HEADER.match(text)
    name = header[1] if header else ""
    find = functools.partial(
        find_steps, module, name, number, near, same_devices=timeline is None
    )
    if baseline is None:
        return _compare(module, find(profile), profile, timeline)
    if not isinstance(baseline, Profile):
        baseline = read_profile(baseline)
    return _compare_usual(module, find(profile), profile, find(baseline), baseline)


def _devices(text: str) -> int:
    """Returns for how many devices a program was compiled."""
    header = text.partition("\n")[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return max(map(int, counts), default=1)


def _compare(
    module: hlo.Module, steps: Steps, profile: Profile, timeline: Timeline | None
) -> Comparison:
    order: Order = {}
    wanted: Ran = {}
    if timeline is not None:
        wanted, order = planned(timeline)
        merged = [
            {device: _merged(ran, wanted) for device, ran in step.items()}
            for step in steps.ran
        ]
        steps = steps._replace(ran=tuple(merged))
    measured = _measure(module, steps, order)
    if timeline is not None:
        alone = measure(module, {0: wanted}, {0: 0.0}, order)
        expected = deviations.as_planned(alone[0])
    else:
        if len(steps.ran) * len(steps.devices) < 3:
            raise UserError(
                f"--profile={profile.path}: {len(steps.ran)} step on "
                f"{len(steps.devices)} devices has nothing to be compared with, as "
                "there are no planned times: trace three steps or more"
            )
        expected = deviations.as_usual(measured)
    found = deviations.deviations(
        module, measured, expected, by_plan=timeline is not None
    )
    listed, during = _explained(found, steps, profile)
    return Comparison(
        module,
        profile,
        steps,
        None,
        timeline and timeline.seconds,
        expected,
        measured,
        listed,
        during,
    )


def _compare_usual(
    module: hlo.Module,
    steps: Steps,
    profile: Profile,
    usual: Steps,
    baseline: Profile,
) -> Comparison:
    """Compares the operations' medians of two profiles, by device."""
    measured = _measure(module, steps, {})
    expected = deviations.as_usual(_measure(module, usual, {}))
    found = Comparison(
        module, profile, steps, baseline, None, expected, measured, (), {}
    )
    number = found.seconds.index(found.step_seconds)
    median = deviations.medians(measured, number)
    one = deviations.deviations(module, [median], expected, by_plan=True)
    listed, during = _explained((x._replace(step=number) for x in one), steps, profile)
    return dataclasses.replace(found, deviations=listed, during=during)


def _measure(module: hlo.Module, steps: Steps, order: Order) -> tuple[Measured, ...]:
    measured, before = [], {}
    for step in steps.ran:
        measured.append(measure(module, step, before, order))
        before = {device: _end(ran) for device, ran in step.items()}
    return tuple(measured)


def _explained(
    found: Iterable[Deviation], steps: Steps, profile: Profile
) -> tuple[tuple[Deviation, ...], dict[int, str]]:
    """Returns deviations in order of time, and what went on during the late ones."""
    during, listed, work = {}, [], host_work(profile)
    for number, x in enumerate(sorted(found, key=lambda x: x.at)):
        if x.cause == LATE:
            idle = explain(x, steps, profile, work)
            x, during[number] = x._replace(cause=idle.cause), idle.during
        listed.append(x)
    return tuple(listed), during


def _merged(ran: Ran, wanted: Ran) -> Ran:
    """Joins the kernels of an instruction that runs several, each time as many."""
    due = collections.Counter(place.name for place in wanted)
    count = collections.Counter(place.name for place in ran)
    several = {
        name: n // due[name]
        for name, n in count.items()
        if due[name] and n > due[name] and n % due[name] == 0
    }
    joined: dict[Place, Operation] = {}
    for place, x in ran.items():
        place = Place(place.name, place.turn // several.get(place.name, 1))
        joined[place] = joined[place]._replace(end=x.end) if place in joined else x
    return joined


def _start(ran: Ran) -> float:
    return min(x.start for x in ran.values())


def _end(ran: Ran) -> float:
    return max(x.end for x in ran.values())
