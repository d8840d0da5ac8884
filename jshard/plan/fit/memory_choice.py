"""Chooses what a config leaves to the memory: `policy.remat` and `policy.accumulate`.

A key with the value "fit" gets the value of the fastest step that the devices have
memory for. The candidates are ordered by a rough roofline, and their memory is
estimated from their jaxprs; then the fastest that should fit is compiled, and XLA's own
figure decides. One compilation is usual, and the run uses that program.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from jshard.plan.fit.device_memory import step_bytes
from jshard.plan.fit.hardware import GPUS, overlapped
from jshard.plan.start_up import product_flops, traffic
from jshard.recipe.config.settings import FIT, RunSettings
from jshard.recipe.config.shared_keys import FITTED
from jshard.recipe.configured import Configured
from jshard.sharding.layout.capacity import state_bytes
from jshard.sharding.settings.mesh import stages_of
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

T = TypeVar("T")

REMAT, ACCUMULATE = FITTED
# Remat policies and what they compute again, in parts of the products' time. Under
# "dots" these are norms and activation functions: 1 % of a Llama, 4 % of GPT-2.
# Under "attention" these are all products but attention's, which are the most where
# sequences are long.
_RECOMPUTED = {"none": 0.0, "dots": 0.03, "attention": 0.24, "full": 0.25}

_GPU = GPUS["h100"]  # only the order of candidates depends on its speed
_KERNELS = 4  # for each matrix product, itself included


class DoesNotFit(UserError):
    """No candidate fits the memory."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Values for the keys that are to be chosen."""

    remat: str
    accumulate: int

    def apply(self, configured: Configured) -> Configured:
        """Returns a recipe with these values in its config."""
        values = {REMAT: self.remat, ACCUMULATE: self.accumulate}
        return configured.with_values(values)

    def __str__(self) -> str:
        batches = "micro-batch" if self.accumulate == 1 else "micro-batches"
        return f"remat {self.remat}, {self.accumulate} {batches}"


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step that is traced, but not compiled."""

    jaxpr: core.Jaxpr  # of the step
    state: Any  # abstract, with shardings
    accumulate: int  # its number of micro-batches
    sizes: Mapping[str, int]  # number of devices along each mesh axis
    network: Mapping[str, int]  # the axes that span hosts (`start_up.network_axes`)


@dataclasses.dataclass(frozen=True)
class Fit(Generic[T]):
    """What was chosen."""

    choice: Candidate
    made: T  # what `compile` returned for it
    note: str  # the choice and its reason, on one line


def check_stages(settings: RunSettings, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError for a pipeline with something to be chosen.

    Its micro-batches decide the bubble, too, which this order of candidates ignores.
    """
    keys = [f"--config.{key}" for key in settings.policy.open_keys]
    if keys and (number := stages_of(mesh)) > 1:
        raise UserError(
            f"mesh: pipe={number}: {' and '.join(keys)} cannot be {FIT!r} with stages; "
            "give values, e.g. those that jshard.plan --search=mesh.pipe finds"
        )


def fit(
    settings: RunSettings,
    parts: int,
    usable: int,
    trace: Callable[[Candidate], Traced],
    compile: Callable[[Candidate], tuple[int, T]],
) -> Fit[T]:
    """Chooses the fastest values of the open keys for which the memory suffices.

    Args:
      settings: with "fit" in one or both of `FITTED`; the other stays as it is.
      parts: groups of devices that the examples are split over.
      usable: bytes of each.
      trace: traces the step of a candidate.
      compile: compiles it; returns the bytes that it needs on a device, and anything.

    Raises:
      DoesNotFit: Not even the most frugal candidate fits; names its need.
    """
    listed = candidates(settings, parts)
    # The first candidate, and the same with more micro-batches if possible.
    more = [c for c in listed[1:] if c.remat == listed[0].remat]
    ends = [trace(c) for c in (listed[0], *more[:1])]
    if (state := state_bytes(ends[0].state)) > usable:
        raise DoesNotFit(_too_large("the state alone", state, usable, settings))
    order = sorted(listed, key=_timer(*ends))
    traces: dict[Candidate, int] = {}  # bytes beside the state
    compiled: dict[Candidate, tuple[int, T]] = {}
    ratio = 1.0  # XLA's figure over the estimate

    def bytes_of(candidate: Candidate) -> float:
        if candidate in compiled:
            return compiled[candidate][0]
        if candidate not in traces:
            traces[candidate] = step_bytes(trace(candidate).jaxpr)
        return state + ratio * traces[candidate]

    while True:
        best = next((c for c in order if bytes_of(c) <= usable), None)
        if best in compiled:
            break
        # An estimate may be too high: the most frugal one is compiled in any case.
        best = best or min(order, key=bytes_of)
        if best in compiled:
            what = f"even with {best}, a step"
            raise DoesNotFit(_too_large(what, compiled[best][0], usable, settings))
        compiled[best] = compile(best)
        ratio = max(compiled[best][0] - state, 0) / max(traces[best], 1)
    needed, made = compiled[best]
    note = f"{best}: {format_bytes(needed)} of {format_bytes(usable)} per device"
    if faster := order[: order.index(best)]:
        other = faster[-1]
        about = "" if other in compiled else "about "
        needs = f"{about}{format_bytes(bytes_of(other))}"
        note += f"; {_difference(other, best)} would need {needs}"
    return Fit(best, made, note)


def candidates(settings: RunSettings, parts: int) -> list[Candidate]:
    """Returns all combinations, from the fewest micro-batches and recomputations."""
    remat, accumulate = settings.policy.remat, settings.policy.accumulate
    examples = max(settings.batch_size // parts, 1)  # of a part in a step
    micro = [n for n in range(1, examples + 1) if examples % n == 0]
    return [
        Candidate(r, m)
        for r in (list(_RECOMPUTED) if remat == FIT else [remat])
        for m in (micro if accumulate == FIT else [accumulate])
    ]


def _timer(first: Traced, more: Traced | None = None) -> Callable[[Candidate], float]:
    """Returns a function that estimates a candidate's step, in seconds.

    It follows from a step with the fewest micro-batches, and one with twice as many.
    """
    flops, products = product_flops(first.jaxpr)
    compute, wire = _GPU.product_seconds(flops), _on_the_wire(first)
    more_wire = overhead = 0.0  # of each further micro-batch
    if more is not None:
        added = more.accumulate - first.accumulate
        more_wire = (_on_the_wire(more) - wire) / added
        # Chunks of a loss are no further launches: there are as many of them.
        further = (product_flops(more.jaxpr)[1] - products) / added
        gradients = 3 * state_bytes(first.state.params)  # read, add, write
        launches = _KERNELS * further * _GPU.constants.launch
        overhead = launches + _GPU.memory_seconds(gradients)

    def seconds(candidate: Candidate) -> float:
        further = candidate.accumulate - first.accumulate
        recomputed = _RECOMPUTED.get(candidate.remat, 0)
        busy = overlapped(compute * (1 + recomputed), wire + further * more_wire)
        return busy + further * overhead

    return seconds


def _on_the_wire(traced: Traced) -> float:
    """Returns the seconds that the links need for a step's collectives."""
    found = traffic(traced.jaxpr, dict(traced.sizes), traced.network).values()
    network = sum(t.network_bytes for t in found)
    inside = sum(t.wire_bytes for t in found) - network
    return network / _GPU.network_port + _GPU.link_seconds(inside)


def _difference(other: Candidate, chosen: Candidate) -> str:
    if other.remat == chosen.remat:
        return f"with {other.accumulate} it"
    if other.accumulate == chosen.accumulate:
        return f"remat {other.remat}"
    return str(other)


def _too_large(what: str, needed: int, usable: int, settings: RunSettings) -> str:
    fitted = [f"--config.{key}={FIT}" for key in settings.policy.open_keys]
    return (
        f"{' '.join(fitted)}: {what} needs "
        f"{format_bytes(needed)} of the {format_bytes(usable)} that a device has; use "
        "more devices, --config.policy.offload=optimizer, or a smaller batch or model"
    )
