"""Constants of the cost model from measured steps, by least squares on log ratios.

A step's prediction is the sum of what its kernels take, each class of them inversely
proportional to a share of the constants, and of the communication that nothing hides.
The fit multiplies groups of constants by one factor each, with the ratios within a
group kept.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jshard.plan.cost.kernel_work import LIMITS
from jshard.plan.cost.streams import COMPUTE
from jshard.plan.cost.timeline import Timeline
from jshard.plan.fit.hardware import GPU, Constants

# Bounds of shares, physical ones: no kernel exceeds its peak, and none that trains a
# large model has been seen below a quarter of it.
LEAST, MOST = 0.25, 1.0
_SHARES = ("matmul", "float8", "attention", "memory")  # in the order of ``Step``
_NOTHING = 1e-6  # seconds
_ITERATIONS, _CLOSE, _STEP = 50, 1e-10, 1e-5
Group = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A measured step, and what its compiled program holds.

    Attributes:
      name: of the run.
      source: what published it; runs of one source count together as one.
      measured: seconds.
      products: seconds of matrix products at the data sheet's peak.
      float8: likewise of those in float8, whose peak is twice as high.
      attention: likewise of attention's.
      memory: seconds of memory-bound kernels at the data sheet's bandwidth.
      kernels: their number.
      exposed: seconds in which kernels wait for collectives or copies.
      doublings: of hosts, of each collective, in all.
    """

    name: str
    source: str
    measured: float
    products: float
    float8: float
    attention: float
    memory: float
    kernels: int
    exposed: float
    doublings: float = 0.0

    def seconds(self, constants: Constants) -> float:
        """The prediction."""
        return (
            self.products / constants.matmul
            + self.float8 / constants.float8
            + self.attention / constants.attention
            + self.memory / constants.memory
            + self.kernels * constants.launch
            + self.exposed
            + self.doublings * constants.straggle
        )

    def ratio(self, constants: Constants) -> float:
        """Measured over predicted."""
        return self.measured / self.seconds(constants)


def step_of(
    name: str, source: str, measured: float, timeline: Timeline, gpu: GPU
) -> Step:
    """Reads a step off its timeline, replayed with the constants of ``gpu``."""
    reached = gpu.constants
    at_peak, kernels = dict.fromkeys(_SHARES, 0.0), 0
    for event in timeline.events:
        if event.stream == COMPUTE:
            kernels += 1
            busy = event.seconds - reached.launch
            limit = LIMITS.get(event.kind, "memory")
            # What waits longer for bytes than for products is bound by memory.
            if gpu.product_seconds(event.flops, limit) <= 0.99 * busy:
                limit = "memory"
            at_peak[limit] += busy * getattr(reached, limit)
    doublings = sum(math.log2(event.hosts) for event in timeline.events)
    exposed = timeline.exposed + timeline.waits_for_copies
    shares = at_peak.values()
    return Step(name, source, measured, *shares, kernels, exposed, doublings)


def fit(steps: Sequence[Step], start: Constants, groups: Sequence[Group]) -> Constants:
    """Scales each group of constants so that predictions are nearest to measurements.

    Gauss-Newton on the logarithms of the factors. The criterion is the sum of squared
    log ratios, in which the steps of a source weigh as much as one. Shares stay within
    ``LEAST`` and ``MOST``.
    """
    logs = np.zeros(len(groups))
    for _ in range(_ITERATIONS):
        ratios, slopes = _linear(steps, start, groups, logs)
        change = np.linalg.lstsq(slopes, ratios, rcond=None)[0]
        logs = logs + change
        if np.abs(change).max() < _CLOSE:
            break
    return _scaled(start, groups, logs)


def fit_variants(
    variants: Sequence[Sequence[Step]], start: Constants, groups: Sequence[Group]
) -> tuple[int, Constants]:
    """Fits constants to each variant of the same steps; the variant that fits best.

    Variants differ in something that is no constant of the planner, such as the speed
    of one kind of network.

    Returns:
      The number of the variant, and its constants.
    """
    fits = [fit(steps, start, groups) for steps in variants]
    errors = [_error(steps, c) for steps, c in zip(variants, fits, strict=True)]
    best = int(np.argmin(errors))
    return best, fits[best]


def standard_errors(
    steps: Sequence[Step], fitted: Constants, groups: Sequence[Group]
) -> list[float]:
    """Relative standard errors of the groups' factors, at the fit.

    A constant that the steps do not tell from others has a large one, or infinity where
    it is at a bound.
    """
    ratios, slopes = _linear(steps, fitted, groups, np.zeros(len(groups)))
    if not slopes.any(axis=0).all():
        return [float("inf")] * len(groups)
    freedom = max(1, len({step.source for step in steps}) - len(groups))
    covariance = np.linalg.pinv(slopes.T @ slopes) * (ratios @ ratios) / freedom
    return [float(error) for error in np.sqrt(np.diag(covariance))]


def left_out(
    variants: Sequence[Sequence[Step]],
    start: Constants,
    groups: Sequence[Group],
    alike: Callable[[Step, Step], bool],
) -> list[float]:
    """Of each step: measured over predicted, by constants fitted without it.

    Args:
      variants: as for ``fit_variants``.
      start: likewise.
      groups: likewise.
      alike: whether a step is left out together with another.
    """
    found = []
    for number, step in enumerate(variants[0]):
        others = [
            [other for other in steps if not alike(step, other)] for steps in variants
        ]
        best, constants = fit_variants(others, start, groups)
        found.append(variants[best][number].ratio(constants))
    return found


def _linear(
    steps: Sequence[Step],
    start: Constants,
    groups: Sequence[Group],
    logs: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted log ratios of measured to predicted, and slopes of the predictions'."""
    roots = _roots(steps)

    def ratios(logs: np.ndarray) -> np.ndarray:
        constants = _scaled(start, groups, logs)
        return roots * np.log([step.ratio(constants) for step in steps])

    now = ratios(logs)
    columns = []
    for number in range(len(groups)):
        moved = np.array(logs)
        moved[number] -= _STEP
        columns.append((ratios(moved) - now) / _STEP)
    return now, np.stack(columns, axis=1)


def _error(steps: Sequence[Step], constants: Constants) -> float:
    """What ``fit`` minimises."""
    ratios = np.log([step.ratio(constants) for step in steps])
    return float(np.sum((_roots(steps) * ratios) ** 2))


def _roots(steps: Sequence[Step]) -> np.ndarray:
    """Square roots of the steps' weights."""
    sources = [step.source for step in steps]
    return np.sqrt([1 / sources.count(source) for source in sources])


def _scaled(start: Constants, groups: Sequence[Group], logs: np.ndarray) -> Constants:
    changed = {}
    for group, log in zip(groups, logs, strict=True):
        for name in group:
            value = getattr(start, name) * float(np.exp(log))
            if name == "straggle":  # the logarithm of nothing has no bound
                value = max(value, _NOTHING)
            elif name != "launch":  # a share
                value = min(max(value, LEAST), MOST)
            changed[name] = value
    return dataclasses.replace(start, **changed)
