"""Maps one layer's update over a stack of layers, of which each device has a shard.

What is elementwise, or reduces, is mapped as it is, and the partitioner leaves it on
shards. What multiplies or decomposes matrices, with all that lies between, is given
whole layers: an all-to-all hands each device one of every n layers, another takes the
shards back. No matrix is gathered, no work is done twice, and of what is whole a
device holds one matrix at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from jshard.compat.jaxprs import contains, evaluate, has, made_by, read_by, variables
from jshard.layout.specs import shard_dim
from jshard.mesh import AXES, FSDP

# Operations that look at a matrix as a whole.
_PRODUCTS = {"dot_general", "svd", "qr", "eigh", "cholesky", "householder_product"}
# Cheap on a whole layer; on shards it would move the dimension that is sharded.
_WHOLE = _PRODUCTS | {"transpose"}


def map_layers(
    fn: Callable[..., Any], args: tuple, mesh: Mesh, min_elements: int
) -> Any:
    """``jax.vmap(fn)(*args)``, for use where arrays are global.

    Args:
      fn: one layer's function of pytrees of arrays.
      args: its arguments, (L, ...) leaves.
      mesh: the mesh.
      min_elements: arrays with fewer elements a layer are replicated.
    """
    leaves, tree = jax.tree.flatten(args)
    closed, result = jax.make_jaxpr(
        lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(*(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves))
    jaxpr = closed.jaxpr
    if mesh.shape[FSDP] == 1 or not contains(jaxpr, _PRODUCTS):
        return jax.vmap(fn)(*args)

    before, whole, after = _split(jaxpr)
    layers = dict(zip(jaxpr.invars, leaves, strict=True))
    fixed = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def stage(eqns: list[Any], outputs: Sequence[Any], run: Callable) -> list[Any]:
        """The ``outputs`` of ``eqns``, (L, ...) each."""
        reads = {*read_by(eqns), *variables(outputs)}
        names = [v for v in layers if v in reads]

        def one_layer(values: list[Any], consts: list[Any]) -> list[Any]:
            env = dict(zip([*names, *fixed], [*values, *consts], strict=True))
            return evaluate(eqns, env, outputs)

        return run(one_layer, [layers[v] for v in names], list(fixed.values()))

    def mapped(one_layer: Callable, values: list, consts: list) -> list[Any]:
        length = leaves[0].shape[0]
        return jax.vmap(one_layer, (0, None), axis_size=length)(values, consts)

    def on_whole_layers(one_layer: Callable, values: list, consts: list) -> list[Any]:
        return _in_rounds(one_layer, values, consts, mesh, min_elements)

    later = set(variables(jaxpr.outvars)).union(read_by(after), *map(read_by, whole))
    for eqns, run in ((before, mapped), *((eqns, on_whole_layers) for eqns in whole)):
        made = [v for eqn in eqns for v in eqn.outvars if v in later]
        layers |= zip(made, stage(eqns, made, run), strict=True)
    outputs = stage(after, jaxpr.outvars, mapped)
    return jax.tree.unflatten(jax.tree.structure(result), outputs)


def _split(jaxpr: core.Jaxpr) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """The equations before any that needs whole layers, those (in parts), and after.

    Parts do not depend on one another: each matrix is one, so that one at a time is
    whole.
    """
    fed: set[Any] = set()  # variables that depend on a whole-layer operation
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
    """Equations that share no result, apart."""
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
    """``part``, and what follows from values it moves anyhow (1.5 x beside x)."""
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
    """``fn`` of every layer, n layers at a time, each on a device of its own."""
    shards = mesh.shape[FSDP]
    length = values[0].shape[0]
    rounds = -(-length // shards)

    def dims(arrays: Any) -> list[int | None]:
        return [shard_dim(x.shape, shards, min_elements=min_elements) for x in arrays]

    layer = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in values]
    outputs = jax.eval_shape(fn, layer, consts)
    dims_in, dims_out = dims(layer), dims(outputs)

    def local(values: list[jax.Array], consts: list[jax.Array]) -> list[jax.Array]:
        def to_rounds(x: jax.Array) -> jax.Array:
            padding = [(0, rounds * shards - length), *[(0, 0)] * (x.ndim - 1)]
            x = jnp.pad(x, padding) if rounds * shards > length else x
            return x.reshape(rounds, shards, *x.shape[1:])

        def one_round(values: list[jax.Array]) -> list[jax.Array]:
            mine = fn(list(map(_to_owner, values, dims_in)), consts)
            return list(map(_from_owner, mine, dims_out))

        results = lax.map(one_round, list(map(to_rounds, values)))
        return [x.reshape(-1, *x.shape[2:])[:length] for x in results]

    # Varying types are not tracked here: replicated results come by all-gather.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_specs(layer, dims_in), [PartitionSpec()] * len(consts)),
        out_specs=_specs(outputs, dims_out),
        axis_names=set(AXES),
        check_vma=False,
    )(values, consts)


def _specs(layer: Sequence[Any], dims: list[int | None]) -> list[PartitionSpec]:
    """Specs of (L, ...) arrays; dims count from the end."""

    def spec(x: Any, dim: int | None) -> PartitionSpec:
        if dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * (x.ndim + 1 + dim), FSDP)

    return list(map(spec, layer, dims))


def _to_owner(x: jax.Array, dim: int | None) -> jax.Array:
    """(n, ...) shards of n layers to the one whole layer that this device owns."""
    if dim is None:
        return x[lax.axis_index(FSDP)]
    return lax.all_to_all(x, FSDP, 0, x.ndim + dim, tiled=True)[0]


def _from_owner(x: jax.Array, dim: int | None) -> jax.Array:
    """The inverse of ``_to_owner``."""
    if dim is None:
        return lax.all_gather(x, FSDP)
    return lax.all_to_all(x[None], FSDP, x.ndim + 1 + dim, 0, tiled=True)
