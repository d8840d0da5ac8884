"""The start-up note: what a step does, counted in the program that will run."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import Mesh

from jshard.nn.attention import KERNELS
from jshard.plan.state_note import parameters, placed
from jshard.sharding.layout.batch import abstract_batch
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.values.random_streams import plain_streams
from jshard.sharding.pipeline.schedule import bubble
from jshard.sharding.pipeline.stages import divide
from jshard.sharding.settings.mesh import (
    EXPERT,
    TENSOR,
    hosts_of,
    mesh_axes,
    mesh_text,
    stages_of,
)
from jshard.sharding.settings.scopes import (
    EXCHANGE_TOKENS,
    FIRST_STAGE,
    FLOAT8,
    FURTHER_ROUNDS,
    LAST_STAGE,
    SCHEDULE,
    TENSOR_PARALLEL,
)
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.sharding.step.program.deterministic import check_deterministic
from jshard.sharding.units.model import make_units
from jshard.system.compat.jaxprs import axes_of, groups_of, scopes_of
from jshard.system.compat.xla_options import is_deterministic
from jshard.system.errors import some_of
from jshard.system.formatting import format_bytes

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "pmax": "all-reduce",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "send",
}
# The dimensions of a block-scaled product, as those of others are given.
_OF_ROWS = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind and dtype in a program."""

    count: int = 0  # how many run, with loops unrolled
    # What each device receives: (n-1)/n of the full arrays, an all-reduce twice that.
    wire_bytes: int = 0
    network_bytes: int = 0  # the part of them in collectives that span hosts


def traffic(
    jaxpr: Any,
    sizes: dict[str, int],
    network: Mapping[str, int] | None = None,
    scope: str = "",
) -> dict[tuple[str, str], Traffic]:
    """Counts the collectives of a jaxpr, by kind and dtype.

    Loop bodies count once per iteration; scalars and groups of one device do not
    count. Collectives that the partitioner adds outside ``shard_map`` are not in a
    jaxpr.

    Args:
      jaxpr: the program, e.g. ``train_step.trace(state, batch).jaxpr.jaxpr``.
      sizes: number of devices along each mesh axis.
      network: the axes that span hosts, and how many of their devices share one.
      scope: counts only collectives in this name scope.
    """
    network = network or {}
    found: dict[tuple[str, str], Traffic] = {}
    for eqn, times in equations(jaxpr):
        kind = _KINDS.get(eqn.primitive.name)
        if kind is None or scope not in scopes_of(eqn):
            continue
        axes, groups = axes_of(eqn), groups_of(eqn)
        n = len(groups[0]) if groups else int(np.prod([sizes[axis] for axis in axes]))
        crosses = any(n > network[axis] for axis in axes if axis in network)
        for x in eqn.outvars if kind == "all-gather" else eqn.invars:
            if n == 1 or x.aval.size <= 1:
                continue
            nbytes = x.aval.size * x.aval.dtype.itemsize
            nbytes = nbytes if kind == "send" else nbytes * (n - 1) // n
            nbytes *= times * (2 if kind == "all-reduce" else 1)
            key = (kind, x.aval.dtype.name)
            old = found.get(key, Traffic())
            found[key] = Traffic(
                old.count + times,
                old.wire_bytes + nbytes,
                old.network_bytes + (nbytes if crosses else 0),
            )
    return found


def equations(
    jaxpr: core.Jaxpr, times: int = 1, per_device: int = 1
) -> Iterator[tuple[Any, int]]:
    """Yields each equation, nested ones included, and how often it runs.

    A loop whose end is known only when it runs counts once, unless it is of rounds that
    only an uneven choice of experts needs. A device of a pipeline takes each branch of
    its schedule once per micro-batch and stage, of which it has ``per_device``; what
    the first and the last stage alone do counts, too.
    """
    for eqn in jaxpr.eqns:
        yield eqn, times
        scopes, runs = scopes_of(eqn), times
        if eqn.primitive.name == "while" and FURTHER_ROUNDS in scopes:
            continue
        if eqn.primitive.name == "scan":
            runs = times * eqn.params["length"]
        elif eqn.primitive.name == "cond" and len(eqn.params["branches"]) > 2:
            micro, per_device, ticks = of_schedule(scopes) or (1, 1, 1)
            runs = times // ticks * micro * per_device
        elif eqn.primitive.name == "cond" and scopes.endswith(
            (FIRST_STAGE, LAST_STAGE)
        ):
            runs = times // per_device
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner, runs, per_device)


def of_schedule(scopes: str) -> tuple[int, int, int] | None:
    """Returns (micro-batches, stages of a device, ticks) if scopes are a pipeline's."""
    found = re.search(SCHEDULE.format(*[r"(\d+)"] * 3), scopes)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def has_experts(jaxpr: core.Jaxpr) -> bool:
    """Returns whether experts take tokens in rounds."""
    return any(FURTHER_ROUNDS in scopes_of(eqn) for eqn, _ in equations(jaxpr))


def _products(jaxpr: core.Jaxpr) -> Iterator[tuple[Any, int, int]]:
    """Yields each matrix product, its FLOPs in all, and how often it runs."""
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in ("dot_general", "block_scaled_dot"):
            (over, _), _ = eqn.params.get("dimension_numbers", _OF_ROWS)
            depth = math.prod(eqn.invars[0].aval.shape[d] for d in over)
            depth = eqn.params.get("depth", depth)  # bytes may have two values
            yield eqn, 2 * times * depth * eqn.outvars[0].aval.size, times


def product_flops(jaxpr: core.Jaxpr) -> tuple[int, int]:
    """Returns the FLOPs of a program's matrix products, and how many there are."""
    found = list(_products(jaxpr))
    return sum(flops for _, flops, _ in found), sum(times for *_, times in found)


def attention_kernels(jaxpr: core.Jaxpr) -> list[str]:
    """Returns what the program's attention is, in words; empty without any."""
    scopes = {scopes_of(eqn) for eqn, _ in equations(jaxpr)}
    return [
        words for scope, words in KERNELS.items() if any(scope in x for x in scopes)
    ]


def network_axes(mesh: Mesh, hosts: Sequence[Any]) -> dict[str, int]:
    """Returns the axes that span hosts, and how many of their devices share one.

    ``hosts`` are those of the mesh's devices (``mesh.hosts_of``).
    """
    of_host = np.reshape(hosts, mesh.devices.shape)
    shared = {}
    for dimension, axis in enumerate(mesh.axis_names):
        same = of_host == of_host.take([0], axis=dimension)
        if axis in mesh_axes(mesh) and not same.all():
            shared[axis] = int(same.sum(axis=dimension).max())
    return shared


def describe(
    fsdp: FSDP,
    state: TrainState,
    batch: Any,
    train_step: Any,
    hosts: Sequence[int] | None = None,
) -> str:
    """Describes a step in a few lines of text, the start-up note.

    They name the devices, the mesh, the number of parameters in total and on each
    device, the collectives of a step with their bytes, and what is replicated and
    why.

    Args:
      fsdp: what made the step.
      state: the state, or an abstract one.
      batch: one process's part of a batch, or abstract global arrays.
      train_step: a train step of ``fsdp``. It is traced here, which saves its first
        call from tracing it.
      hosts: the host of each process, as for ``make_mesh``.
    """
    mesh, policy = fsdp.mesh, fsdp.policy
    abstract = abstract_batch(batch, mesh, fsdp.sequences)
    jaxpr = train_step.trace(state, abstract).jaxpr.jaxpr
    layout = Layout.of(state, policy, mesh, fsdp.tensor_splits)
    model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
    make_units(model, fsdp.units)
    sizes = dict(mesh.shape)
    host_of = hosts_of(list(mesh.devices.flat), hosts)
    network = network_axes(mesh, host_of)
    device = mesh.devices.flat[0]
    kind = getattr(device, "device_kind", device.platform)
    text = f"{mesh.size} x {kind}: {mesh_text(mesh)}"
    if (number := len(set(host_of))) > 1:
        where = [
            f"{axis} {'across' if axis in network else 'within'}"
            for axis in mesh_axes(mesh)
        ]
        text += f"; {number} hosts: {', '.join(where)} them"
    lines = [("mesh", text), ("parameters", parameters(state))]
    for (name, dtype), t in sorted(traffic(jaxpr, sizes, network).items()):
        bytes_of_device = format_bytes(t.wire_bytes)
        text = f"{t.count} per step, {bytes_of_device} per device, {dtype}"
        if t.network_bytes == t.wire_bytes:
            text += ", over the network"
        elif network:
            part = format_bytes(t.network_bytes) if t.network_bytes else "none"
            text += f", {part} over the network"
        lines.append((name + "s", text))
    if stages_of(mesh) > 1:
        lines.append(("pipeline", _pipeline(state, fsdp)))
    lines += _tensor(jaxpr, sizes, network) + _experts(jaxpr, state, layout)
    if kernels := attention_kernels(jaxpr):
        lines.append(("attention", ", and ".join(kernels)))
    if policy.products():
        lines.append(("float8", _float8(jaxpr)))
    if is_deterministic(fsdp.compiler_options):
        lines.append(("deterministic", check_deterministic(jaxpr, device, mesh.size)))
    lines += placed(model, state, layout)
    norms = [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm)
    ]
    if norms and policy.accumulate > 1:
        text = "statistics of one micro-batch over all devices; each of the "
        text += f"{policy.accumulate} micro-batches updates the running statistics"
        lines.append(("batch norm", f"{some_of(norms, limit=4)}: {text}"))
    if streams := plain_streams(model):
        text = "plain random streams, whose draws depend on the mesh (those of "
        text = f"{some_of(streams, limit=4)}: {text}jshard.Dropout do not)"
        lines.append(("random", text))
    return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _float8(jaxpr: Any) -> str:
    """Says which part of the products with weights, by FLOPs, is in float8."""
    flops, in_float8 = 0, 0
    for eqn, work, _ in _products(jaxpr):
        _, (batch, _) = eqn.params.get("dimension_numbers", _OF_ROWS)
        if not batch:  # attention has batches of heads
            flops += work
            in_float8 += work if FLOAT8 in scopes_of(eqn) else 0
    part = in_float8 / flops if flops else 0
    return (
        f"{part:.0%} of the FLOPs of products with weights: those of layers' "
        "nnx.Linear, LinearGeneral, Einsum and jshard.nn.matmul"
    )


def _pipeline(state: TrainState, fsdp: FSDP) -> str:
    """Says what its stages have, and how long they are idle."""
    stages = divide(state.model_arrays, fsdp.mesh, fsdp.policy)
    micro, counts = fsdp.policy.accumulate, " + ".join(map(str, stages.counts()))
    idle = bubble(stages.devices, micro, stages.per_device)
    return (
        f"{counts} layers in {stages.number} stages, {micro} micro-batches: a device "
        f"is idle for {idle:.1%} of a step (the bubble); the counts above are for a "
        "device that would have both the first and the last stage"
    )


def _tensor(
    jaxpr: Any, sizes: dict[str, int], network: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Says what layers that "tensor" splits exchange."""
    if sizes.get(TENSOR, 1) == 1:
        return []
    moved = traffic(jaxpr, sizes, network, scope=TENSOR_PARALLEL).values()
    exchanged = sum(x.wire_bytes for x in moved)
    text = f"{sum(x.count for x in moved)} exchanges of tokens per step, "
    text += f"{format_bytes(exchanged)} per device; matrix products wait for them"
    if across := sum(x.network_bytes for x in moved):
        text += f"; {format_bytes(across)} cross the network: keep the tensor axis "
        text += "within a host"
    return [("tensor", text)]


def _experts(jaxpr: Any, state: TrainState, layout: Layout) -> list[tuple[str, str]]:
    """Compares what an exchange of tokens moves with gathers of all experts."""
    sizes, policy = dict(layout.mesh.shape), layout.policy
    devices, gathered = sizes.get(EXPERT, 1), 0
    for path, variable in state.flat_params():
        place, x = layout.places[path], variable.get_value()
        if all(axis != EXPERT for _, axis in place.part.splits):
            continue
        arrives = jnp.dtype(place.weight.gather or x.dtype)
        reduced = jnp.dtype(place.gradient.reduce or place.weight.compute or arrives)
        gathers = 2 if policy.unit(path).reshard_after_forward else 1
        moved = gathers * arrives.itemsize
        moved += reduced.itemsize if place.gradient.trainable else 0
        # Split over e devices and sharded over f, a device gathers 1/e of the experts,
        # of which it has 1/f; whole, all of them, of which it has 1/ef.
        gathered += (x.size - x.size // devices) * moved
    if not gathered:
        return []
    moved = traffic(jaxpr, sizes, scope=EXCHANGE_TOKENS)
    exchanged = sum(x.wire_bytes for x in moved.values())
    gathered *= 1 if policy.defer_scatter else policy.accumulate
    text = f"split over {devices} devices: exchanging tokens moves "
    text += f"{format_bytes(exchanged)} per device and step; gathering all experts "
    text += f"would move {format_bytes(gathered)}"
    return [("experts", text)]
