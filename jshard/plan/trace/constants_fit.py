"""Constants of the cost model from a trace: what the same kernels took on this machine.

Each constant is fitted to the operations that it limits: those whose predicted time
grows with it most. It is the value at which the sum of their predicted times is that of
their measured ones (a ratio estimate, Cochran 1977, Sampling Techniques, chapter 6).
"""

import collections
import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jshard.plan.cost.streams import Event
from jshard.plan.cost.timeline import cost, replay
from jshard.plan.fit.hardware import GPU, Constants
from jshard.plan.planning import Plan
from jshard.plan.trace.comparison import Comparison
from jshard.plan.trace.measured import BEGIN
from jshard.system.errors import UserError
from jshard.system.formatting import format_count, format_seconds

# In the order in which they are fitted: what all kernels have, then what they are
# limited by. True are seconds, which times grow with; the others are speeds.
_CONSTANTS = {
    "launch": True,
    "memory": False,
    "matmul": False,
    "float8": False,
    "mxfp8": False,
    "nvfp4": False,
    "attention": False,
    "link": False,
    "network_port": False,
    "host_bus": False,
}
_ROUNDS = 3  # constants depend on each other a little
_LIMITED = 1.6  # times longer with a constant that is half (or twice) as fast
_LEAST = 3  # operations that a constant is fitted to


class Timed(NamedTuple):
    """An instruction with the times of its runs, and what a GPU should take for it."""

    seconds: float  # the median over steps, devices and turns
    times: int  # how often it ran
    event: Callable[[GPU], Event]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Constants that a trace tells.

    Attributes:
      constants: those fitted, and the plan's where the trace does not tell.
      counts: how many instructions each was fitted to; none are the plan's own.
      predicted: seconds of the step with them.
      measured: of the median step of the trace.
      products: of the products, by FLOPs: (FLOPs, how many, share of the peak).
    """

    constants: Constants
    counts: dict[str, int]
    predicted: float
    measured: float
    products: tuple[tuple[float, int, float], ...]

    def as_json(self) -> dict[str, Any]:
        """Returns a file for ``--constants``; it has those that are not 0."""
        names = (*_CONSTANTS, "straggle", "source")
        found = {name: getattr(self.constants, name) for name in names}
        return {name: value for name, value in found.items() if value}

    def lines(self) -> list[str]:
        """Returns the fit in lines of text."""
        found = []
        for name, count in self.counts.items():
            value = getattr(self.constants, name)
            shown = format_seconds(value) if _CONSTANTS[name] else f"{value:.3g}"
            label = "" if found else "constants"
            many = f"fitted to {count} instructions"
            found.append(f"{label:15} {name} {shown}, {many}")
        kept = [name for name in (*_CONSTANTS, "straggle") if name not in self.counts]
        found.append(f"{'':15} the trace does not tell {', '.join(kept)}: as planned")
        steps = map(format_seconds, (self.predicted, self.measured))
        found.append(f"{'refitted':15} {' per step, where '.join(steps)} were measured")
        for i, (flops, count, share) in enumerate(self.products):
            label = "" if i else "products"
            each = f"{count} of {format_count(flops)} FLOP"
            found.append(f"{label:15} {share:.1%} of the peak ({each})")
        return found


def fit_constants(plan: Plan, found: Comparison) -> Fit:
    """Fits the constants of the cost model to a trace of a plan's program.

    Raises:
      UserError: the plan has no times, as on CPUs, or no constant can be told.
    """
    if plan.gpu is None or plan.timeline is None:
        raise UserError(
            "--fit: there are no planned times for these devices, so no constants of "
            "theirs: trace on a GPU that jshard knows"
        )
    operations, gpu = _operations(plan, found), plan.gpu
    counts: dict[str, int] = {}
    for _ in range(_ROUNDS):
        for name, in_seconds in _CONSTANTS.items():
            limited = [x for x in operations if _limits(name, in_seconds, x, gpu)]
            if len(limited) >= _LEAST:
                counts[name] = len(limited)
                gpu = _with(gpu, name, _solve(name, in_seconds, limited, gpu))
    if not counts:
        raise UserError(
            f"--fit: {found.profile.path} has fewer than {_LEAST} instructions that "
            "any one constant limits: trace a larger step"
        )
    seconds = replay(plan.module, gpu, plan.devices, plan.pipeline).seconds
    source = f"fitted to {found.profile.path}, {datetime.date.today()}"
    # One program says nothing of how far others are from their plans.
    made = dataclasses.replace(gpu.constants, low=1.0, high=1.0, source=source)
    products = _products(operations, gpu)
    return Fit(made, counts, seconds, found.step_seconds, products)


def _operations(plan: Plan, found: Comparison) -> list[Timed]:
    """Returns the instructions that ran, with their own times."""
    taken: dict[str, list[float]] = collections.defaultdict(list)
    for step in found.measured:
        for ran in step.values():
            for place, took in ran.items():
                if place != BEGIN:
                    taken[place.name].append(took.seconds)
    operations = []
    for body in plan.module.computations.values():
        for x in body.instructions:
            if times := taken.get(x.name):

                def event(gpu: GPU, body: Any = body, x: Any = x) -> Event:
                    return cost(plan.module, body, x, gpu, plan.devices)

                operations.append(Timed(statistics.median(times), len(times), event))
    return operations


def _with(gpu: GPU, name: str, value: float) -> GPU:
    constants = dataclasses.replace(gpu.constants, **{name: value})
    return dataclasses.replace(gpu, constants=constants)


def _limits(name: str, in_seconds: bool, x: Timed, gpu: GPU) -> bool:
    """Whether an operation takes much longer where a constant is worse."""
    worse = getattr(gpu.constants, name) * (2.0 if in_seconds else 0.5)
    longer = x.event(_with(gpu, name, worse)).seconds
    return longer > _LIMITED * x.event(gpu).seconds


def _solve(name: str, in_seconds: bool, operations: Sequence[Timed], gpu: GPU) -> float:
    """Returns the constant with which they take as long as they did, by bisection."""
    wanted = sum(x.seconds * x.times for x in operations)

    def takes(value: float) -> float:
        other = _with(gpu, name, value)
        return sum(x.event(other).seconds * x.times for x in operations)

    now = getattr(gpu.constants, name)
    low, high = math.log(now / 64), math.log(now * 64)
    for _ in range(40):
        middle = (low + high) / 2
        if (takes(math.exp(middle)) < wanted) == in_seconds:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _products(
    operations: Sequence[Timed], gpu: GPU
) -> tuple[tuple[float, int, float], ...]:
    """Returns the products by their FLOPs, those with the most time first."""
    groups: dict[float, list[Timed]] = collections.defaultdict(list)
    for x in operations:
        if flops := x.event(gpu).flops:
            groups[flops].append(x)
    rows = []
    for flops, group in groups.items():
        seconds = sum(x.seconds * x.times for x in group)
        count = sum(x.times for x in group)
        rows.append((seconds, (flops, len(group), flops * count / seconds / gpu.flops)))
    return tuple(row for _, row in sorted(rows, reverse=True)[:5])
