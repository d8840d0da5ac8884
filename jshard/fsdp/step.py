"""What one device does in a step, inside ``shard_map``.

Each value belongs to one device, and nothing is summed over devices unless a line says
so. Counts are reduced first, then each micro-batch runs forward and backward. The
backward starts from weight / global count, so that no sum over tokens ever grows large,
and each gradient ends with the layout of its parameter.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.collectives.gather import all_gather
from jshard.collectives.reduce import all_reduce, scatter
from jshard.compat.jaxprs import trace_once, without_dead_code
from jshard.errors import UserError
from jshard.fsdp.mesh import manual_axes
from jshard.fsdp.precision import at_least_float32
from jshard.fsdp.state import ModelArrays
from jshard.layout.layout import Layout
from jshard.layout.placement import Placement
from jshard.nn.dropout import fold_streams, merge_state, microbatch, unfold_streams
from jshard.nn.loss import Loss, Mean, divide, fold_weights, map_means, split_result
from jshard.parallel.tensor import make_parallel
from jshard.unit import modules
from jshard.unit.calls import own_containers
from jshard.unit.equal import differing
from jshard.unit.remat import check_names

# (params, frozen, model_state) -> a model whose units gather their shards
Build = Callable[..., nnx.Module]


def builder(
    graphdef: nnx.GraphDef,
    units: tuple[type, ...],
    tensor_parallel: tuple[tuple[str, ...], ...],
    layout: Layout,
    *,
    training: bool,
) -> Build:
    """Returns a function that makes the model on one device, over its shards.

    The modules at paths in ``tensor_parallel`` are called within that function.
    ``layout`` is that of the parameters that the model is made of. The root is gathered
    at once, except in train mode if the policy makes it a unit (``reshard_root``).
    """

    def build(
        params: nnx.State, frozen: nnx.State, model_state: nnx.State
    ) -> nnx.Module:
        model = nnx.merge(graphdef, params, frozen, model_state, copy=True)
        own_containers(model)
        if training:
            model.train()
        else:
            model.eval()
        make_parallel(model, tensor_parallel)
        modules.make_units(model, units)
        modules.place(model, layout.policy, layout.places)
        if not training or layout.policy.reshard_root is False:
            modules.gather_root(model)
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
    """Returns gradients, metrics and the next model state.

    Args:
      build: makes the model from its arrays.
      loss_fn: ``loss_fn(model, batch)``.
      layout: the state's layout; its policy sets the number of micro-batches
        (``accumulate``) and when gradients are scattered (``defer_scatter``).
      arrays: local shards, and the model state.
      batch: this device's examples, (examples, ...) each.
      scale: scales the loss in the backward; None is 1.
    """
    accumulate, defer_scatter = layout.policy.accumulate, layout.policy.defer_scatter
    shards, places = arrays.params, layout.places_of(arrays.params)

    def run(params, frozen, state, batch, index=0):
        folded = fold_streams(state, index)
        model = build(params, frozen, folded)
        with microbatch(index, accumulate):
            results = _checked(loss_fn(model, batch))
        return *results, unfold_streams(state, folded, _next_state(state, model))

    if defer_scatter:
        both = (places, layout.places_of(arrays.frozen))
        params, frozen = jax.tree.map(all_gather, arrays[:2], both)
        arrays, layout = ModelArrays(params, frozen, arrays[2]), layout.gathered()
    if accumulate == 1:
        forward = _traced(run, layout, arrays, batch)
        of_params = lambda params: forward(params, *arrays[1:], batch)
        _, pullback, (loss, metrics, after) = jax.vjp(
            of_params, arrays.params, has_aux=True
        )
        counts = [lax.psum(mean.count, manual_axes()) for _, mean in loss.terms]
        (grads,) = pullback(_seeds(loss, counts, scale))
        after = merge_state(arrays.model_state, after)
    else:
        dtypes = jax.tree.map(lambda shard: shard.dtype, shards)
        zeros = jax.tree.map(lambda x, d: jnp.zeros(x.shape, d), arrays.params, dtypes)
        micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], micro)
        forward = _traced(run, layout, arrays, first, jnp.uint32(0))
        grads, loss, metrics, after = _accumulate(forward, arrays, micro, zeros, scale)
    if defer_scatter:
        grads = jax.tree.map(scatter, grads, places)
    grads = jax.tree.map(_sum_at_end, grads, places, shards)
    if scale is not None:
        # In float16 the scale may overflow, and the quotient underflow.
        grads = jax.tree.map(lambda g: at_least_float32(g) / scale, grads)
    loss, metrics = _global((loss, metrics))
    means = {"loss": loss, **metrics}
    return grads, {name: mean.compute() for name, mean in means.items()}, after


def evaluate(
    loss_fn: Callable[[Any, Any], Any],
    layout: Layout,
    build: Build,
    arrays: ModelArrays,
    batch: Any,
) -> tuple[Loss, dict[str, Mean]]:
    """Returns the loss and the named Means, with global totals and counts."""

    def run(params, frozen, state, batch):
        model = build(params, frozen, fold_streams(state, 0))
        return *_checked(loss_fn(model, batch)), None

    _, (loss, metrics, _) = _traced(run, layout, arrays, batch)(*arrays, batch)
    return _global((loss, metrics))


def predict(
    fn: Callable[[Any, Any], Any],
    layout: Layout,
    build: Build,
    arrays: ModelArrays,
    batch: Any,
) -> Any:
    """Returns ``fn(model, batch)`` of this device's examples."""

    def run(params, frozen, state, batch):
        return fn(build(params, frozen, fold_streams(state, 0)), batch)

    run, _, jaxpr = trace_once(run, *arrays, batch)
    _differing(jaxpr, layout, arrays, batch)
    return run(*arrays, batch)


def _traced(
    run: Callable, layout: Layout, arrays: ModelArrays, batch: Any, *index: Any
) -> Callable:
    """Traces ``run`` once, and checks what must be equal on all devices.

    Args:
      run: ``run(params, frozen, state, batch, *index)`` returns the loss, the named
        Means, the weights of terms that the step computes, and the next state or None.
      layout: of the parameters in ``arrays``.
      arrays: as one device has them.
      batch: its examples.
      *index: the micro-batch.

    Returns:
      ``forward``, with the arguments of ``run``, which returns the totals of the loss's
      terms, and (loss, metrics, next state).

    Raises:
      UserError: a weight, or a part of the next state, may differ by device.
    """
    run, shapes, jaxpr = trace_once(run, *arrays, batch, *index)
    check_names(jaxpr, layout.policy)
    differs = _differing(jaxpr, layout, arrays, batch, *index)
    _, _, of_weights, of_state = jax.tree.unflatten(jax.tree.structure(shapes), differs)
    if any(of_weights):
        raise UserError(
            "loss_fn: a weight of the loss is computed from a device's own examples; "
            "reduce what it is computed from with jshard.pmean, or multiply the total "
            "of the Mean by it"
        )
    if of_state is not None:
        equal = jax.tree.map(lambda _: False, arrays.model_state)
        _check_state(merge_state(equal, of_state))

    def forward(*args: Any) -> tuple[list, tuple]:
        loss, metrics, _, after = run(*args)
        return [mean.total for _, mean in loss.terms], (loss, metrics, after)

    return forward


def _differing(
    jaxpr: Any, layout: Layout, arrays: ModelArrays, batch: Any, *index: Any
) -> list[bool]:
    """Returns whether each result of a step's program may differ by device.

    Raises:
      UserError: collectives run under a condition that does.
    """
    params = [*jax.tree.leaves(layout.places_of(arrays.params))]
    params += jax.tree.leaves(layout.places_of(arrays.frozen))
    axes: list[tuple[str, ...]] = [place.differs_over() for place in params]
    axes += [()] * len(jax.tree.leaves(arrays.model_state))
    axes += [manual_axes()] * len(jax.tree.leaves(batch))
    axes += [()] * len(index)
    names = [
        ".".join(map(str, path))
        for part in arrays[:2]
        for path, _ in nnx.to_flat_state(part)
    ]
    return differing(jaxpr, axes, names)


def _check_state(differs: nnx.State) -> None:
    """Raises UserError if any part of the next model state may differ by device."""
    for path, variable in nnx.to_flat_state(differs):
        if any(jax.tree.leaves(variable)):
            name = ".".join(map(str, path))
            raise UserError(
                f"model state {name!r} may end the step different on each device; "
                "reduce what it is computed from with jshard.pmean (nnx.BatchNorm: "
                "leave axis_name out; callbacks: keep their results out of the state)"
            )


def _accumulate(
    forward: Callable,
    arrays: ModelArrays,
    micro: Any,
    zeros: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Loss, dict[str, Mean], nnx.State]:
    """Scans micro-batches; adds up gradients, in the dtypes of ``zeros``, and Means.

    ``forward(params, frozen, state, batch, index)`` runs one of ``micro``,
    (micro-batches, examples, ...) each.
    """
    number = len(jax.tree.leaves(micro)[0])
    indices = jnp.arange(number, dtype=jnp.uint32)
    counts = _count(forward, arrays, micro, indices)
    first = jax.tree.map(lambda x: x[0], micro)
    _, (loss, metrics, _) = jax.eval_shape(forward, *arrays, first, indices[0])

    def body(carry, slices):
        sums, state = carry
        # Without the barrier XLA moves gathers, whose shards are the same for every
        # micro-batch, out of the loop, and keeps the full weights for all of it.
        index, batch = slices  # the index is the same everywhere and needs no barrier
        (params, frozen), batch = lax.optimization_barrier((arrays[:2], batch))
        rest = (frozen, state, batch, index)
        _, pullback, (loss, metrics, after) = jax.vjp(
            lambda params: forward(params, *rest), params, has_aux=True
        )
        (grads,) = pullback(_seeds(loss, counts, scale))
        means = [mean for _, mean in loss.terms]
        sums = jax.tree.map(
            lambda s, x: s + x.astype(s.dtype), sums, (grads, means, metrics)
        )
        last = index == number - 1
        return (sums, merge_state(state, after, last=last)), [w for w, _ in loss.terms]

    start = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        ([mean for _, mean in loss.terms], metrics),
    )
    start = ((zeros, *start), arrays.model_state)
    ((grads, means, metrics), after), weights = lax.scan(body, start, (indices, micro))
    terms = ((weight[0], mean) for weight, mean in zip(weights, means, strict=True))
    return grads, Loss(tuple(terms)), metrics, after


def _count(
    forward: Callable, arrays: ModelArrays, micro: Any, indices: jax.Array
) -> list[jax.Array]:
    """Returns the global counts of the loss's terms, by a pass for counts only."""

    def one(_, slices):
        index, batch = slices
        leaves, tree = jax.tree.flatten((*arrays, batch, index))

        def of_leaves(*leaves):
            _, (loss, *_) = forward(*jax.tree.unflatten(tree, leaves))
            return [mean.count for _, mean in loss.terms]

        return None, without_dead_code(of_leaves)(*leaves)

    _, counts = lax.scan(one, None, (indices, micro))
    return [lax.psum(jnp.sum(count, axis=0), manual_axes()) for count in counts]


def _seeds(
    loss: Loss, counts: list[jax.Array], scale: jax.Array | None
) -> list[jax.Array]:
    """Returns the cotangent of each total: its weight / global count."""
    seeds = []
    for (weight, mean), count in zip(loss.terms, counts, strict=True):
        seed = divide(weight, count)
        seed = seed if scale is None else seed * scale
        seeds.append(seed.astype(mean.total.dtype))
    return seeds


def _sum_at_end(grad: jax.Array, place: Placement, shard: jax.Array) -> jax.Array:
    """Returns a shard's gradient, summed over devices unless its unit did that."""
    if place.sum_at == "step":
        grad = all_reduce(grad, place)
    return grad.astype(shard.dtype)


def _checked(result: Any) -> tuple[Loss, dict[str, Mean], list[jax.Array]]:
    """Returns the loss, the named Means, and the weights that the step computes.

    Raises:
      UserError: ``loss_fn`` returned something else, or Means of no scalars.
    """

    def fix(mean: Any) -> Any:
        if not isinstance(mean, Mean):
            return jnp.asarray(mean)  # a weight
        total, count = jnp.asarray(mean.total), jnp.asarray(mean.count)
        if total.shape or count.shape:
            raise UserError(
                "loss_fn: a Mean needs scalars, got total of shape "
                f"{total.shape} and count of shape {count.shape}; sum them first"
            )
        return Mean(at_least_float32(total), at_least_float32(count))

    loss, metrics = split_result(result)
    loss, weights = fold_weights(loss)
    return *map_means(fix, (loss, metrics)), weights


def _global(tree: Any) -> Any:
    """Sums totals and counts over all devices."""
    axes = manual_axes()
    return map_means(
        lambda x: (
            Mean(lax.psum(x.total, axes), lax.psum(x.count, axes))
            if isinstance(x, Mean)
            else x
        ),
        tree,
    )


def _next_state(before: nnx.State, model: nnx.Module) -> nnx.State:
    """Returns the model's state after the forward, in the structure of ``before``."""
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))))
    kept = [(path, after[path]) for path, _ in nnx.to_flat_state(before)]
    return nnx.from_flat_state(kept)
