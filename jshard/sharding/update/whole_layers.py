"""Functions of complete matrices, in updates of a Stack's layers that are sharded.

What is elementwise or reduces is mapped over the layers of a Stack and stays on shards.
A function that multiplies or decomposes matrices says that it needs complete ones. Then
an all-to-all gives each device one of every n layers, and another returns the shards of
the result: no matrix is gathered, no work is done twice, and a device holds one full
layer of what the function takes at a time.
"""

import contextlib
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.sharding.layout.padding import padded_dim
from jshard.sharding.layout.specs import shard_dim
from jshard.sharding.settings.mesh import mesh_axes, shard_axes, shards_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.scopes import within

_sharding = ContextVar[tuple[Mesh, Policy] | None]("sharding", default=None)


def sharded_update(
    mesh: Mesh, policy: Policy
) -> contextlib.AbstractContextManager[None]:
    """Tells ``whole_layers`` how parameters are sharded while an update is traced."""
    return within(_sharding, (mesh, policy))


def whole_layers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets ``per_layer`` compute a function of matrices on complete layers.

    For the part of an optimizer of your own that multiplies or decomposes matrices, as
    the iterations of Muon do, which ``per_layer`` knows. Without it the compiler
    decides how such products of shards are computed, and gathers all layers at once.

    Args:
      fn: takes and returns pytrees of arrays of one layer. Called outside of
        ``per_layer``, or for parameters outside Stacks, it is ``fn`` itself.
    """
    return _mapped(fn, 0)


def _mapped(fn: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """Returns ``fn`` of arrays with ``depth`` layer dimensions first."""

    @custom_vmap
    def call(*args: Any) -> Any:
        sharding = _sharding.get()
        if depth and sharding is not None and shards_of(sharding[0]) > 1:
            return _in_rounds(fn, depth, args, *sharding)
        mapped = fn
        for _ in range(depth):
            mapped = jax.vmap(mapped)
        return mapped(*args)

    @call.def_vmap
    def over_layers(length: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        def each(x: jax.Array, has_layers: bool) -> jax.Array:
            return x if has_layers else jnp.broadcast_to(x, (length, *x.shape))

        results = _mapped(fn, depth + 1)(*jax.tree.map(each, args, tuple(mapped)))
        return results, jax.tree.map(lambda _: True, results)

    return call


def _in_rounds(
    fn: Callable[..., Any], depth: int, args: Any, mesh: Mesh, policy: Policy
) -> Any:
    """Applies ``fn`` to n complete layers at a time, each on its own device."""
    shards, axes = shards_of(mesh), shard_axes(mesh)
    layers = jax.tree.leaves(args)[0].shape[:depth]
    length = math.prod(layers)
    rounds = -(-length // shards)

    def to_rounds(x: jax.Array) -> jax.Array:
        x = x.reshape(length, *x.shape[depth:])
        x = jnp.pad(x, [(0, rounds * shards - length), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(rounds, shards, *x.shape[1:])

    def as_shards(x: jax.Array) -> jax.Array:
        """Places n layers as parameters are, each device a shard of all."""
        spec: list[Any] = [None] * x.ndim
        dim = _dim(x.shape[1:], shards, policy.min_shard_elements)
        if dim is not None:
            spec[dim] = axes
        return lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(*spec))
        )

    # A layer a device: the compiler exchanges shards for layers, and layers for shards.
    on_owners = jax.shard_map(
        jax.vmap(fn),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(axes),
        axis_names=set(mesh_axes(mesh)),
        check_vma=False,
    )

    def one_round(args: Any) -> Any:
        return jax.tree.map(as_shards, on_owners(*jax.tree.map(as_shards, args)))

    results = lax.map(one_round, jax.tree.map(to_rounds, args))
    return jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:length].reshape(*layers, *x.shape[2:]),
        results,
    )


def _dim(shape: tuple[int, ...], shards: int, min_elements: int) -> int | None:
    """Returns the dimension of which devices have parts, that of a parameter."""
    dim = shard_dim(shape, shards, min_elements=min_elements)
    # A few numbers, such as coefficients, are no parameter's.
    few = math.prod(shape) < min_elements or max(shape, default=0) < shards
    return padded_dim(shape, shards) if dim is None and not few else dim
