"""The start-up note: what a step will do, counted in the program that will run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from jshard.compat.collective_primitives import axes_of, groups_of
from jshard.formatting import format_bytes
from jshard.layout.layers import layer_dims
from jshard.layout.layout import Layout
from jshard.layout.memory_kinds import HOST
from jshard.mesh import AXES, BATCH, FSDP, REPLICA, hosts_of
from jshard.nn.dropout import plain_streams
from jshard.state import TrainState
from jshard.unit.batch_norm import batch_norms
from jshard.unit.modules import root_variables

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "all_to_all": "all-to-all",
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and dtype in a program.

    Attributes:
      count: how many run, loops unrolled.
      wire_bytes: what each device receives: (n-1)/n of the full arrays, twice that
        for an all-reduce.
      network_bytes: those of collectives whose devices are in several hosts.
    """

    count: int
    wire_bytes: int
    network_bytes: int = 0


def traffic(
    jaxpr: Any, sizes: dict[str, int], network: Mapping[str, int] | None = None
) -> dict[tuple[str, str], Traffic]:
    """Counts the collectives written in a jaxpr, by kind and dtype.

    Loop bodies count times their trips; scalars, and groups of one device, do not
    count. What the partitioner adds outside ``shard_map`` is not in a jaxpr.

    Args:
      jaxpr: the program, e.g. ``train_step.trace(state, batch).jaxpr.jaxpr``.
      sizes: devices along each mesh axis.
      network: as ``network_axes`` gives them.
    """
    network = network or {}
    found: dict[tuple[str, str], Traffic] = {}

    def visit(jaxpr: core.Jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            kind = _KINDS.get(eqn.primitive.name)
            if kind is not None:
                _add(found, kind, eqn, sizes, times, network)
            inner = (
                times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            )
            for sub in core.jaxprs_in_params(eqn.params):
                visit(sub, inner)

    visit(jaxpr, 1)
    return found


def _add(
    found: dict[tuple[str, str], Traffic],
    kind: str,
    eqn: Any,
    sizes: dict[str, int],
    times: int,
    network: Mapping[str, int],
) -> None:
    axes, groups = axes_of(eqn), groups_of(eqn)
    n = len(groups[0]) if groups else int(np.prod([sizes[axis] for axis in axes]))
    if n == 1:
        return
    for x in eqn.outvars if kind == "all-gather" else eqn.invars:
        if x.aval.size <= 1:
            continue
        nbytes = x.aval.size * x.aval.dtype.itemsize * (n - 1) // n
        nbytes *= 2 if kind == "all-reduce" else 1
        key = (kind, x.aval.dtype.name)
        old = found.get(key, Traffic(0, 0))
        crosses = any(n > network[axis] for axis in axes if axis in network)
        outside = nbytes if crosses else 0
        found[key] = Traffic(
            old.count + times,
            old.wire_bytes + times * nbytes,
            old.network_bytes + times * outside,
        )


def network_axes(mesh: Mesh, hosts: Sequence[int] | None = None) -> dict[str, int]:
    """The axes along which devices are in several hosts, and how many share one.

    Args:
      mesh: of real devices, or of those of a topology.
      hosts: the host of each process, as for ``make_mesh``.
    """
    of_host = np.reshape(hosts_of(list(mesh.devices.flat), hosts), mesh.devices.shape)
    shared = {}
    for dimension, axis in enumerate(mesh.axis_names):
        same = of_host == of_host.take([0], axis=dimension)
        if axis in AXES and not same.all():
            shared[axis] = int(same.sum(axis=dimension).max())
    return shared


def global_batch(batch: Any, mesh: Any) -> Any:
    """The abstract global batch of which ``batch`` is one process's part.

    Args:
      batch: arrays of the host, (examples, ...) each, or global ones, abstract or not.
      mesh: what the examples are sharded over.
    """
    processes, sharding = jax.process_count(), NamedSharding(mesh, BATCH)

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shape = (np.shape(x)[0] * processes, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype, sharding=sharding)

    return jax.tree.map(abstract, batch)


def describe(
    layout: Layout,
    state: TrainState,
    model: nnx.Module,
    jaxpr: Any,
    hosts: Sequence[int] | None = None,
) -> str:
    """The start-up note as lines of text.

    Args:
      layout: of the state, on the mesh where it runs.
      state: the state, abstract or not.
      model: the model over the state's global (abstract) values, with its Units.
      jaxpr: of the train step.
      hosts: the host of each process, as for ``make_mesh``.
    """
    mesh, policy = layout.mesh, layout.policy
    sizes = dict(mesh.shape)
    network = network_axes(mesh, hosts)
    device = mesh.devices.flat[0]
    kind = getattr(device, "device_kind", device.platform)
    lines = [
        (
            "mesh",
            f"{mesh.size} x {kind}: {REPLICA} {sizes[REPLICA]} x {FSDP} {sizes[FSDP]}"
            + _over_hosts(mesh, hosts, network),
        ),
        ("parameters", _parameters(state, mesh)),
    ]
    for (name, dtype), t in sorted(traffic(jaxpr, sizes, network).items()):
        text = f"{t.count} a step, {format_bytes(t.wire_bytes)} a device, {dtype}"
        if t.network_bytes == t.wire_bytes:
            text += ", over the network"
        elif network:
            part = format_bytes(t.network_bytes) if t.network_bytes else "none"
            text += f", {part} over the network"
        lines.append((name + "s", text))
    lines += _replicated(state, layout) + _root(model, state, layout)
    norms = batch_norms(model)
    if norms and policy.accumulate > 1:
        text = f"{_some(norms)}: over one of the {policy.accumulate} micro-batches, of "
        text += "all devices; running statistics move with each micro-batch"
        lines.append(("batch norm", text))
    streams = plain_streams(model)
    if streams:
        lines.append(
            (
                "random",
                f"{_some(streams)}: plain random streams, whose draws depend on the "
                "mesh (jshard.Dropout's do not)",
            )
        )
    return "\n".join(f"{name:<16}{text}" for name, text in lines)


def _over_hosts(
    mesh: Mesh, hosts: Sequence[int] | None, network: Mapping[str, int]
) -> str:
    number = len(set(hosts_of(list(mesh.devices.flat), hosts)))
    if number == 1:
        return ""
    where = [f"{axis} {'across' if axis in network else 'within'}" for axis in AXES]
    return f"; {number} hosts: {', '.join(where)} them"


def _parameters(state: TrainState, mesh: Mesh) -> str:
    params = jax.tree.leaves((state.params, state.frozen))
    trained = sum(x.size for x in jax.tree.leaves(state.params))
    total, local = sum(x.size for x in params), sum(map(_local_size, params))
    held = {"host": 0, "device": 0}
    for x in filter(_is_plain, jax.tree.leaves(state)):
        where = "host" if x.sharding.memory_kind == HOST else "device"
        held[where] += _local_size(x) * x.dtype.itemsize
    text = f"{total:,} ({local:,} a device); state {format_bytes(held['device'])}"
    text += " a device"
    if held["host"]:
        text += f", {format_bytes(held['host'])} for each in host memory"
    return text if trained == total else f"{text}; {trained:,} are trained"


def _is_plain(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _local_size(x: Any) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape)))


def _replicated(state: TrainState, layout: Layout) -> list[tuple[str, str]]:
    shards, fewest = layout.mesh.shape[FSDP], layout.policy.min_shard_elements
    if shards == 1:
        return [("replicated", "everything: the fsdp axis has one device")]
    small, indivisible = [], []
    for tree in (state.params, state.frozen):
        for path, variable in nnx.to_flat_state(tree):
            if layout.places[path].dim is None:
                shape = np.shape(variable.get_value())
                few = np.prod(shape[layer_dims(variable) :]) < fewest
                (small if few else indivisible).append(".".join(map(str, path)))
    lines = []
    if small:
        reason = f"fewer than {fewest} elements (a layer)"
        lines.append(("replicated", f"{reason}: {_some(small)}"))
    if indivisible:
        reason = f"no dimension divides by {shards}"
        lines.append(("replicated", f"{reason}: {_some(indivisible)}"))
    return lines


def _root(
    model: nnx.Module, state: TrainState, layout: Layout
) -> list[tuple[str, str]]:
    root = root_variables(model, state.params, state.frozen)
    if not root or layout.mesh.shape[FSDP] == 1:
        return []
    names = [".".join(map(str, path)) for path, _ in root]
    nbytes = sum(v.get_value().size * v.get_value().dtype.itemsize for _, v in root)
    kept = (
        "kept whole during a step"
        if not layout.policy.reshard_root
        else "a unit itself"
    )
    text = f"{format_bytes(nbytes)} in no Stack or Unit, {kept}"
    return [("root", f"{text}: {_some(names)}")]


def _some(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
