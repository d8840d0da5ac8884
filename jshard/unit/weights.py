"""The weights of one unit: gathered, kept for the backward or not, scattered."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jshard.comm.collectives import all_gather, join, split, sum_copies
from jshard.comm.collectives import scatter as scatter_one
from jshard.comm.varying import abstract_like, is_float, vary, varying
from jshard.layout.placement import Placement
from jshard.mesh import manual_axes
from jshard.policy import Reshard


def full(shards: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """Abstract gathered weights of abstract shards."""
    traced = jax.make_jaxpr(lambda shards: gather_all(shards, places))(list(shards))
    return list(map(abstract_like, traced.out_avals))


def gather_all(shards: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """All weights, for the forward."""
    return [all_gather(vary(s), p) for s, p in zip(shards, places, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_before(
    places: tuple[Placement, ...], shards: list[jax.Array], x: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """All weights, and ``x``, whose gradient waits until theirs are scattered."""
    return gather_all(shards, places), x


def _gather_before_forward(places, shards, x):
    return gather_before(places, shards, x), shards


def _gather_before_backward(places, shards, cotangents):
    grads, x_ct = cotangents
    trained = [p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)]
    grads = [grad if t else None for grad, t in zip(grads, trained, strict=True)]
    parts, x_ct = lax.optimization_barrier((scatter_shards(grads, places), x_ct))
    return sum_shards(parts, shards), x_ct


gather_before.defvjp(_gather_before_forward, _gather_before_backward)


def keep(
    weights: list[Any], places: Sequence[Placement], read: list[int], reshard: Reshard
) -> list[Any] | None:
    """What is kept of gathered weights: of those in ``read``, by the backward."""
    if reshard is True:
        return None
    group = int(reshard)  # 0 where False: all of them
    return [split(weights[i], places[i], group) if group else weights[i] for i in read]


def to_gather(
    kept: list[Any] | None, shards: Sequence[Any], read: list[int]
) -> list[Any]:
    """What the backward starts from: the weights that ``keep`` kept, or the shards."""
    return [shards[i] for i in read] if kept is None else kept


def gather_read(
    parts: list[Any], places: Sequence[Placement], read: list[int], reshard: Reshard
) -> list[Any]:
    """The weights that the backward reads, None for the others."""
    weights: list[Any] = [None] * len(places)
    for i, part in zip(read, parts, strict=True):
        if reshard is True:
            weights[i] = all_gather(vary(part), places[i])
        else:
            weights[i] = join(part, places[i], int(reshard)) if reshard else part
    return weights


def scatter(
    grads: Sequence[Any], places: Sequence[Placement], shards: Sequence[Any]
) -> list[Any]:
    """Gradients of shards from those of whole weights, None where there is none."""
    return sum_shards(scatter_shards(grads, places), shards)


def scatter_shards(grads: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """The first half of ``scatter``: sums over "fsdp"."""
    return [
        None if grad is None else scatter_one(grad, place)
        for grad, place in zip(grads, places, strict=True)
    ]


def sum_shards(parts: Sequence[Any], shards: Sequence[Any]) -> list[Any]:
    """The second half: sums over "replica", in the shards' dtypes."""
    return [
        None if part is None else sum_copies(part, shard)
        for part, shard in zip(parts, shards, strict=True)
    ]


def hold(tree: Any, arrived: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Both as they are, but to XLA neither is there before the other is.

    Else XLA could gather the weights of many units before the first runs, or merge
    the backward's gathers with the forward's and keep the weights in between.

    A barrier types all that passes it as varying, so what does not vary of ``arrived``
    stays out.
    """
    if not jax.tree.leaves(tree):
        return tree, list(arrived)
    late = [set(varying(x)) == set(manual_axes()) for x in arrived]
    passing = [x for x, is_late in zip(arrived, late, strict=True) if is_late]
    tree, passing = lax.optimization_barrier((tree, passing))
    passed = iter(passing)
    return tree, [
        next(passed) if is_late else x for x, is_late in zip(arrived, late, strict=True)
    ]
