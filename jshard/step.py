"""What one device does in a step, inside ``shard_map``.

Counts first, then forward and backward a micro-batch at a time. The backward starts
from weight / global count, so that no sum over tokens ever grows large, and leaves
each gradient with the layout of its parameter.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.comm.collectives import all_gather, reduce_scatter
from jshard.comm.equal_state import differing, of_first_device
from jshard.comm.varying import vary, varying, zeros_like
from jshard.compat.jaxprs import without_dead_code
from jshard.errors import UserError
from jshard.layout.layout import Layout
from jshard.mesh import AXES, manual_axes
from jshard.nn.dropout import fold_streams, merge_state, microbatch
from jshard.nn.loss import Loss, Mean, divide, split_result
from jshard.state import ModelArrays
from jshard.unit import modules

# (params, frozen, model_state) -> a model whose units gather
Build = Callable[..., nnx.Module]


def builder(
    graphdef: nnx.GraphDef,
    units: tuple[type, ...],
    layout: Layout,
    *,
    training: bool,
) -> Build:
    """Makes the model on one device, over shards that its units and root gather.

    Args:
      graphdef: the model's structure.
      units: module types that become Units.
      layout: of the parameters that the model is made of.
      training: whether the model is in train mode, or in eval mode.
    """

    def build(
        params: nnx.State, frozen: nnx.State, model_state: nnx.State
    ) -> nnx.Module:
        model = nnx.merge(graphdef, params, frozen, model_state, copy=True)
        if training:
            model.train()
        else:
            model.eval()
        modules.make_units(model, units)
        modules.place(model, layout.policy, layout.places)
        return model

    return build


def train(
    build: Build,
    loss_fn: Callable[[Any, Any], Any],
    layout: Layout,
    arrays: ModelArrays,
    batch: Any,
    scale: jax.Array | None,
) -> tuple[nnx.State, dict[str, jax.Array], nnx.State]:
    """Gradients, metrics and the next model state.

    Args:
      build: makes the model from its arrays.
      loss_fn: ``loss_fn(model, batch)``.
      layout: of the state; its policy says how many micro-batches there are, and when
        their gradients are scattered.
      arrays: local shards, and the model state.
      batch: this device's examples, (examples, ...) each.
      scale: of the loss in the backward; None is 1.
    """
    params, frozen, model_state = arrays
    accumulate, defer_scatter = layout.policy.accumulate, layout.policy.defer_scatter
    places = layout.places_of(params)
    # Gradients are summed once a step where that is cheaper: those of replicated
    # parameters always, those of shards over "replica" when they accumulate first.
    local = jax.tree.map(
        lambda p, place: vary(p) if place.dim is None or accumulate > 1 else p,
        params,
        places,
    )

    # Below, shards are (params, frozen).
    def run(shards, state, batch, index):
        model = build(*shards, fold_streams(state, index))
        with microbatch(index, accumulate):
            loss, metrics = split_result(loss_fn(model, batch))
        return loss, metrics, _next_state(state, model)

    def forward(shards, state, batch, index):
        loss, metrics, after = run(shards, state, batch, index)
        after = _typed_as(state, after, run, (shards, state, batch, index))
        return _typed(loss), _typed(metrics), after

    def totals(shards, state, batch, index):
        loss, metrics, after = forward(shards, state, batch, index)
        return [mean.total for _, mean in loss.terms], (loss, metrics, after)

    def backward(shards, state, batch, index, counts):
        params, frozen = shards
        _, pullback, (loss, metrics, after) = jax.vjp(
            lambda params: totals((params, frozen), state, batch, index),
            params,
            has_aux=True,
        )
        counts = counts or [lax.psum(mean.count, AXES) for _, mean in loss.terms]
        seeds = [
            vary(_seed(weight, count, mean.total.dtype, scale))
            for (weight, mean), count in zip(loss.terms, counts, strict=True)
        ]
        (grads,) = pullback(seeds)
        return grads, loss, metrics, after

    shards = (local, frozen)
    if defer_scatter:
        gather = lambda shard, place: all_gather(vary(shard), place)
        both = (places, layout.places_of(frozen))
        shards = jax.tree.map(gather, (params, frozen), both)
    if accumulate == 1:
        grads, loss, metrics, after = backward(shards, model_state, batch, 0, None)
        after = merge_state(model_state, after)
    else:
        grads, loss, metrics, after = _accumulate(
            forward, backward, accumulate, shards, params, model_state, batch
        )
    if defer_scatter:
        grads = jax.tree.map(reduce_scatter, grads, places, params)
    grads = jax.tree.map(
        lambda g, p: lax.psum(g, _between(p, g)) if _between(p, g) else g, grads, params
    )
    if scale is not None:
        # In float16 the scale may be infinite, and what it is divided by zero.
        grads = jax.tree.map(lambda g: _at_least_float32(g) / scale, grads)
    loss, metrics = _global(loss), _global(metrics)
    values: dict[str, Any] = {"loss": loss.compute()}
    return grads, values | {k: m.compute() for k, m in metrics.items()}, after


def evaluate(
    build: Build, loss_fn: Callable[[Any, Any], Any], arrays: ModelArrays, batch: Any
) -> tuple[Loss, dict[str, Mean]]:
    """The loss's terms and the named Means, with global totals and counts."""
    params, frozen, model_state = arrays
    model = build(params, frozen, fold_streams(model_state, 0))
    loss, metrics = split_result(loss_fn(model, batch))
    return _global(_typed(loss)), _global(_typed(metrics))


def _accumulate(
    forward: Callable,
    backward: Callable,
    number: int,
    shards: tuple[nnx.State, nnx.State],
    params: nnx.State,
    model_state: nnx.State,
    batch: Any,
) -> tuple:
    """Scans ``number`` micro-batches; gradients add up in the parameters' dtypes."""
    micro = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
    indices = jnp.arange(number, dtype=jnp.uint32)
    counts = _count(forward, shards, model_state, micro, indices)

    def body(carry, slices):
        sums, state = carry
        # Without the barrier XLA moves gathers whose shards are the same for every
        # micro-batch out of the loop, and keeps the full weights for all of it.
        index, batch = slices  # the index stays outside: it is the same everywhere
        held, batch = lax.optimization_barrier((shards, batch))
        grads, loss, metrics, after = backward(held, state, batch, index, counts)
        sums = jax.tree.map(
            lambda s, x: s + x.astype(s.dtype), sums, (grads, *_parts(loss, metrics))
        )
        last = index == number - 1
        return (sums, merge_state(state, after, last=last)), [w for w, _ in loss.terms]

    shapes = jax.eval_shape(
        lambda p, s, b: _parts(*forward(p, s, b, indices[0])[:2]),
        shards,
        model_state,
        jax.tree.map(lambda x: x[0], micro),
    )
    zeros = jax.tree.map(lambda s: vary(jnp.zeros(s.shape, s.dtype)), shapes)
    nothing = jax.tree.map(
        lambda x, p: zeros_like(x).astype(p.dtype), shards[0], params
    )
    start = ((nothing, *zeros), model_state)
    ((grads, means, metrics), after), weights = lax.scan(body, start, (indices, micro))
    terms = ((weight[0], mean) for weight, mean in zip(weights, means, strict=True))
    return grads, Loss(tuple(terms)), metrics, after


def _count(forward, shards, model_state, micro, indices) -> list[jax.Array]:
    """Global counts of the loss's terms, by a pass that computes nothing else."""

    def one(counts, slices):
        inputs = (shards, model_state, *slices)
        leaves, tree = jax.tree.flatten(inputs)

        def of_leaves(*leaves):
            shards, state, index, batch = jax.tree.unflatten(tree, leaves)
            loss, _, _ = forward(shards, state, batch, index)
            return [mean.count for _, mean in loss.terms]

        return None, without_dead_code(of_leaves)(*leaves)

    _, counts = lax.scan(one, None, (indices, micro))
    return [lax.psum(jnp.sum(count, axis=0), AXES) for count in counts]


def _parts(loss: Loss, metrics: dict[str, Mean]) -> tuple:
    return [mean for _, mean in loss.terms], metrics


def _seed(
    weight: Any, count: jax.Array, dtype: Any, scale: jax.Array | None
) -> jax.Array:
    seed = divide(weight, count)
    return (seed if scale is None else seed * scale).astype(dtype)


def _typed(tree: Any) -> Any:
    """Means with array totals and counts that vary by device; checks their shapes."""

    def fix(mean: Any) -> Any:
        if not isinstance(mean, Mean):
            return jnp.asarray(mean)  # a weight
        total, count = jnp.asarray(mean.total), jnp.asarray(mean.count)
        if total.shape or count.shape:
            raise UserError(
                "loss_fn: a Mean needs scalars, got total of shape "
                f"{total.shape} and count of shape {count.shape}; sum them first"
            )
        return Mean(vary(_at_least_float32(total)), vary(_at_least_float32(count)))

    return jax.tree.map(fix, tree, is_leaf=lambda x: isinstance(x, Mean))


def _at_least_float32(x: jax.Array) -> jax.Array:
    """For sums over devices and micro-batches: float16 ends at 65504."""
    low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if low else x


def _global(tree: Any) -> Any:
    """Totals and counts summed over all devices."""

    def fix(x: Any) -> Any:
        if isinstance(x, Mean):
            return Mean(lax.psum(x.total, AXES), lax.psum(x.count, AXES))
        # A weight is the same everywhere; where its type says otherwise, make it so.
        x = jnp.asarray(x)
        return lax.pmean(vary(x), AXES) if varying(x) else x

    return jax.tree.map(fix, tree, is_leaf=lambda x: isinstance(x, Mean))


def _between(param: jax.Array, grad: jax.Array) -> tuple[str, ...]:
    missing = varying(grad) - varying(param)
    return tuple(axis for axis in manual_axes() if axis in missing)


def _next_state(before: nnx.State, model: nnx.Module) -> nnx.State:
    """The model's state after the forward, in the structure of ``before``."""
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))))
    kept = [(path, after[path]) for path, _ in nnx.to_flat_state(before)]
    return nnx.from_flat_state(kept)


def _typed_as(
    before: nnx.State, after: nnx.State, run: Callable, inputs: tuple
) -> nnx.State:
    """``after`` with the types of ``before``; ``run(*inputs)`` gave it.

    Raises:
      UserError: it differs by device where ``before`` does not.
    """
    flat = dict(nnx.to_flat_state(after))
    more = [
        path
        for path, variable in nnx.to_flat_state(before)
        if varying(flat[path].get_value()) - varying(variable.get_value())
        and not isinstance(variable, (nnx.RngKey, nnx.RngCount))
    ]
    if not more:
        return after

    def values(*inputs: Any) -> list[jax.Array]:
        state = dict(nnx.to_flat_state(run(*inputs)[2]))
        return [state[path].get_value() for path in more]

    shards, state, batch, index = inputs
    differs = differing(
        values, (shards, False), (state, False), (batch, True), (index, False)
    )
    for path, differ in zip(more, differs, strict=True):
        if differ:
            name = ".".join(map(str, path))
            raise UserError(
                f"model state {name!r} ends the step different on each device; reduce "
                "what it is computed from with jshard.pmean (nnx.BatchNorm: leave "
                "axis_name out)"
            )
        flat[path] = flat[path].copy(of_first_device(flat[path].get_value()))
    return nnx.from_flat_state(list(flat.items()))
