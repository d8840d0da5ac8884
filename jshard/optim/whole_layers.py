"""Maps the update of one layer over a stack of layers, sharded over the devices.

Operations that are elementwise or reduce are mapped directly, and the partitioner keeps
them on shards. Operations that multiply or decompose matrices, and all between them,
run on complete layers: an all-to-all gives each device one of every n layers, another
returns the shards. No matrix is gathered, no work is done twice, and a device holds one
full matrix at a time.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.compat.jaxprs import evaluate, find, has, made_by, read_by, variables
from jshard.fsdp.mesh import axes_of, shard_axes, shards_of
from jshard.layout.padding import padded_dim
from jshard.layout.specs import shard_dim

# Operations that need a complete matrix.
_PRODUCTS = {"dot_general", "svd", "qr", "eigh", "cholesky", "householder_product"}
# Cheap on a complete layer; on shards it would move the dimension that is sharded.
_WHOLE = _PRODUCTS | {"transpose"}


def map_layers(
    fn: Callable[..., Any], args: tuple, mesh: Mesh, min_elements: int
) -> Any:
    """Computes ``jax.vmap(fn)(*args)`` of pytrees of global arrays, (L, ...) each.

    Arrays with fewer than ``min_elements`` a layer are replicated.
    """
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
    closed, result = jax.make_jaxpr(fn, return_shape=True)(*layer)
    jaxpr, leaves = closed.jaxpr, jax.tree.leaves(args)
    if shards_of(mesh) == 1 or find(jaxpr.eqns, _PRODUCTS) is None:
        return jax.vmap(fn)(*args)

    before, whole, after = _split(jaxpr)
    env = dict(zip(jaxpr.invars, leaves, strict=True))  # (L, ...) each

    def run(eqns: list[Any], outputs: Sequence[Any], complete: bool) -> list[Any]:
        """Runs ``eqns`` for all layers; returns ``outputs``, (L, ...) each."""
        reads = {*read_by(eqns), *variables(outputs)}
        names = [v for v in env if v in reads]

        def one_layer(values: list[Any], consts: list[Any]) -> list[Any]:
            inner = dict(zip(names, values, strict=True))
            inner |= zip(jaxpr.constvars, consts, strict=True)
            return evaluate(eqns, inner, outputs)

        values = [env[v] for v in names]
        if complete:
            return _in_rounds(one_layer, values, closed.consts, mesh, min_elements)
        mapped = jax.vmap(one_layer, (0, None), axis_size=leaves[0].shape[0])
        return mapped(values, closed.consts)

    later = set(variables(jaxpr.outvars)).union(read_by(after), *map(read_by, whole))
    for eqns in (before, *whole):
        made = [v for eqn in eqns for v in eqn.outvars if v in later]
        env |= zip(made, run(eqns, made, eqns is not before), strict=True)
    outputs = run(after, jaxpr.outvars, False)
    return jax.tree.unflatten(jax.tree.structure(result), outputs)


def _split(jaxpr: core.Jaxpr) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Splits equations: before those that need complete layers, those, and after.

    Those are in independent parts, so that a device has one full matrix at a time.
    """
    fed: set[Any] = set()  # variables that depend on an operation on complete layers
    for eqn in jaxpr.eqns:
        if has(eqn, _WHOLE) or fed.intersection(variables(eqn.invars)):
            fed.update(eqn.outvars)
    feeds: set[Any] = set()  # variables that such an operation depends on
    before, whole, after = [], [], []
    for eqn in reversed(jaxpr.eqns):
        needed = has(eqn, _WHOLE) or not feeds.isdisjoint(eqn.outvars)
        if needed:
            feeds.update(variables(eqn.invars))
        depends = not fed.isdisjoint(eqn.outvars)
        (whole if needed and depends else after if depends else before).append(eqn)
    before = before[::-1]
    return before, [_with(p, before) for p in _parts(whole[::-1])], after[::-1]


def _parts(eqns: list[Any]) -> list[list[Any]]:
    """Groups equations so that no group reads another's results."""
    parts: list[dict[int, Any]] = []
    for index, eqn in enumerate(eqns):
        reads = set(variables(eqn.invars))
        joined = {index: eqn}
        for part in [p for p in parts if reads & made_by(p.values())]:
            parts.remove(part)
            joined |= part
        parts.append(joined)
    return [[part[i] for i in sorted(part)] for part in parts]


def _with(part: list[Any], before: list[Any]) -> list[Any]:
    """Adds what follows from values that ``part`` moves anyway (1.5 x beside x)."""
    moved = read_by(part)
    again = [
        eqn
        for eqn in before
        if moved.issuperset(variables(eqn.invars)) and moved.intersection(eqn.outvars)
    ]
    return again + part


def _in_rounds(
    fn: Callable[[list, list], list],
    values: list[jax.Array],
    consts: list[jax.Array],
    mesh: Mesh,
    min_elements: int,
) -> list[jax.Array]:
    """Applies ``fn`` to n complete layers at a time, each on its own device."""
    shards = shards_of(mesh)
    length = values[0].shape[0]
    rounds = -(-length // shards)

    def dims(arrays: Any) -> list[int | None]:
        return [_dim(x.shape, shards, min_elements) for x in arrays]

    layer = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in values]
    outputs = jax.eval_shape(fn, layer, consts)
    dims_in, dims_out = dims(layer), dims(outputs)

    def resized(x: jax.Array, layer: Any, dim: int | None, *, back: bool) -> jax.Array:
        """Pads what the shards do not divide, or with ``back`` takes that away."""
        if dim is None or layer.shape[dim] % shards == 0:
            return x
        place = NamedSharding(mesh, _spec(layer, dim, mesh))
        size = layer.shape[dim] if back else -(-layer.shape[dim] // shards) * shards
        x = x if back else lax.with_sharding_constraint(x, place)
        return lax.with_sharding_constraint(_resized(x, dim, size), place)

    def to_rounds(x: jax.Array) -> jax.Array:
        padding = [(0, rounds * shards - length), *[(0, 0)] * (x.ndim - 1)]
        x = jnp.pad(x, padding) if rounds * shards > length else x
        return x.reshape(rounds, shards, *x.shape[1:])

    def local(values: list[jax.Array], consts: list[jax.Array]) -> list[jax.Array]:
        def one_round(values: list[jax.Array]) -> list[jax.Array]:
            mine = fn(list(map(_to_owner, values, dims_in, layer)), consts)
            return list(map(_from_owner, mine, dims_out))

        results = lax.map(one_round, list(map(to_rounds, values)))
        return [x.reshape(-1, *x.shape[2:])[:length] for x in results]

    # Varying types are not tracked here: replicated results come by all-gather.
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            [_spec(x, dim, mesh) for x, dim in zip(layer, dims_in, strict=True)],
            [PartitionSpec()] * len(consts),
        ),
        out_specs=[
            _spec(x, dim, mesh) for x, dim in zip(outputs, dims_out, strict=True)
        ],
        axis_names=set(axes_of(mesh)),
        check_vma=False,
    )
    pad, exact = (functools.partial(resized, back=back) for back in (False, True))
    results = run(list(map(pad, values, layer, dims_in)), consts)
    return list(map(exact, results, outputs, dims_out))


def _dim(shape: tuple[int, ...], shards: int, min_elements: int) -> int | None:
    """Returns the dimension of which devices have parts, that of a parameter."""
    dim = shard_dim(shape, shards, min_elements=min_elements)
    # A few numbers, such as coefficients, are no parameter's.
    if (
        dim is None
        and min_elements <= math.prod(shape)
        and max(shape, default=0) >= shards
    ):
        return padded_dim(shape, shards)
    return dim


def _resized(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Cuts a dimension, counted from the end, to a size, or pads it with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, max(0, size - x.shape[dim]))
    x = jnp.pad(x, widths) if widths[dim][1] else x
    return (
        x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=x.ndim + dim)
    )


def _spec(layer: Any, dim: int | None, mesh: Mesh) -> PartitionSpec:
    """Returns the spec of (L, ...); ``dim`` counts from the end."""
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * (layer.ndim + 1 + dim), shard_axes(mesh))


def _to_owner(x: jax.Array, dim: int | None, layer: Any) -> jax.Array:
    """Exchanges (n, ...) shards of n layers for the full layer this device owns."""
    if dim is None:
        return x[lax.axis_index(shard_axes())]
    mine = lax.all_to_all(x, shard_axes(), 0, x.ndim + dim, tiled=True)[0]
    return _resized(mine, dim, layer.shape[dim])


def _from_owner(x: jax.Array, dim: int | None) -> jax.Array:
    """Does the inverse of ``_to_owner``."""
    if dim is None:
        return lax.all_gather(x, shard_axes())
    shards = lax.axis_size(shard_axes())
    x = _resized(x, dim, -(-x.shape[dim] // shards) * shards)
    return lax.all_to_all(x[None], shard_axes(), x.ndim + 1 + dim, 0, tiled=True)
