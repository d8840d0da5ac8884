"""What one device does in a step, inside ``shard_map``.

Counts are reduced first, then each micro-batch runs forward and backward. The backward
starts from weight / global count, so that no sum over tokens ever grows large, and each
gradient ends with the layout of its parameter.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.comm.collectives import all_gather, all_reduce, reduce_scatter
from jshard.comm.varying import vary, varying, zeros_like
from jshard.compat.jaxprs import trace_once, without_dead_code
from jshard.errors import UserError
from jshard.layout.layout import Layout
from jshard.mesh import manual_axes
from jshard.nn.dropout import fold_streams, merge_state, microbatch, unfold_streams
from jshard.nn.loss import Loss, Mean, divide, map_means, split_result
from jshard.nn.tensor import make_parallel
from jshard.precision import at_least_float32
from jshard.state import ModelArrays
from jshard.unit import modules
from jshard.unit.equal_state import differing, of_first_device

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
    params, frozen, model_state = arrays
    accumulate, defer_scatter = layout.policy.accumulate, layout.policy.defer_scatter
    places = layout.places_of(params)
    # Gradients of replicated parameters are summed once, at the end of the step; with
    # accumulation, so are those of shards over "replica".
    local = jax.tree.map(
        lambda p, place: vary(p) if place.dim is None or accumulate > 1 else p,
        params,
        places,
    )

    def run(params, frozen, state, batch, index):
        folded = fold_streams(state, index)
        model = build(params, frozen, folded)
        with microbatch(index, accumulate):
            loss, metrics = split_result(loss_fn(model, batch))
        loss, metrics = _typed((loss, metrics))
        totals = [mean.total for _, mean in loss.terms]
        after = unfold_streams(state, folded, _next_state(state, model))
        return totals, (loss, metrics, after)

    if defer_scatter:
        both = (places, layout.places_of(frozen))
        local, frozen = jax.tree.map(all_gather, (params, frozen), both)
    if accumulate == 1:
        of_params = functools.partial(
            run, frozen=frozen, state=model_state, batch=batch, index=0
        )
        _, pullback, (loss, metrics, after) = jax.vjp(of_params, local, has_aux=True)
        counts = [lax.psum(mean.count, manual_axes()) for _, mean in loss.terms]
        (grads,) = pullback(_seeds(loss, counts, scale))
        inputs = (local, frozen, model_state, batch, 0)
        after = merge_state(model_state, _typed_as(model_state, after, run, inputs))
    else:
        zeros = jax.tree.map(lambda x, p: zeros_like(x).astype(p.dtype), local, params)
        # The mesh types that a barrier gives, so that micro-batches are traced once.
        local, frozen = jax.tree.map(vary, (local, frozen))
        arrays = ModelArrays(local, frozen, model_state)
        grads, loss, metrics, after = _accumulate(
            run, accumulate, arrays, batch, zeros, scale
        )
    if defer_scatter:
        grads = jax.tree.map(reduce_scatter, grads, places, params)
    grads = jax.tree.map(all_reduce, grads, params)
    if scale is not None:
        # In float16 the scale may overflow, and the quotient underflow.
        grads = jax.tree.map(lambda g: at_least_float32(g) / scale, grads)
    loss, metrics = _global((loss, metrics))
    means = {"loss": loss, **metrics}
    return grads, {name: mean.compute() for name, mean in means.items()}, after


def evaluate(
    loss_fn: Callable[[Any, Any], Any], build: Build, arrays: ModelArrays, batch: Any
) -> tuple[Loss, dict[str, Mean]]:
    """Returns the loss and the named Means, with global totals and counts."""
    params, frozen, model_state = arrays
    model = build(params, frozen, fold_streams(model_state, 0))
    return _global(_typed(split_result(loss_fn(model, batch))))


def _accumulate(
    run: Callable,
    number: int,
    arrays: ModelArrays,
    batch: Any,
    zeros: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Loss, dict[str, Mean], nnx.State]:
    """Scans micro-batches; adds up gradients, in the dtypes of ``zeros``, and Means.

    ``run(params, frozen, state, batch, index)`` runs one micro-batch of ``number``.
    """
    micro = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
    indices = jnp.arange(number, dtype=jnp.uint32)
    first = (*arrays, jax.tree.map(lambda x: x[0], micro), indices[0])
    traced, (_, (loss, metrics, _)) = trace_once(run, *first)
    counts = _count(traced, arrays, micro, indices)

    def body(carry, slices):
        sums, state = carry
        # Without the barrier XLA moves gathers, whose shards are the same for every
        # micro-batch, out of the loop, and keeps the full weights for all of it.
        index, batch = slices  # the index is the same everywhere and needs no barrier
        (params, frozen), batch = lax.optimization_barrier((arrays[:2], batch))
        rest = (frozen, state, batch, index)
        _, pullback, (loss, metrics, after) = jax.vjp(
            lambda params: traced(params, *rest), params, has_aux=True
        )
        (grads,) = pullback(_seeds(loss, counts, scale))
        after = _typed_as(state, after, traced, (params, *rest))
        means = [mean for _, mean in loss.terms]
        sums = jax.tree.map(
            lambda s, x: s + x.astype(s.dtype), sums, (grads, means, metrics)
        )
        last = index == number - 1
        return (sums, merge_state(state, after, last=last)), [w for w, _ in loss.terms]

    start = jax.tree.map(
        lambda s: vary(jnp.zeros(s.shape, s.dtype)),
        ([mean for _, mean in loss.terms], metrics),
    )
    start = ((zeros, *start), arrays.model_state)
    ((grads, means, metrics), after), weights = lax.scan(body, start, (indices, micro))
    terms = ((weight[0], mean) for weight, mean in zip(weights, means, strict=True))
    return grads, Loss(tuple(terms)), metrics, after


def _count(
    run: Callable, arrays: ModelArrays, micro: Any, indices: jax.Array
) -> list[jax.Array]:
    """Returns the global counts of the loss's terms, by a pass for counts only."""

    def one(_, slices):
        index, batch = slices
        leaves, tree = jax.tree.flatten((*arrays, batch, index))

        def of_leaves(*leaves):
            _, (loss, *_) = run(*jax.tree.unflatten(tree, leaves))
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
        seeds.append(vary(seed.astype(mean.total.dtype)))
    return seeds


def _typed(tree: Any) -> Any:
    """Types totals and counts as arrays that vary by device; checks their shapes."""

    def fix(mean: Any) -> Any:
        if not isinstance(mean, Mean):
            return jnp.asarray(mean)  # a weight
        total, count = jnp.asarray(mean.total), jnp.asarray(mean.count)
        if total.shape or count.shape:
            raise UserError(
                "loss_fn: a Mean needs scalars, got total of shape "
                f"{total.shape} and count of shape {count.shape}; sum them first"
            )
        return Mean(vary(at_least_float32(total)), vary(at_least_float32(count)))

    return map_means(fix, tree)


def _global(tree: Any) -> Any:
    """Sums totals and counts over all devices."""

    def fix(x: Any) -> Any:
        if isinstance(x, Mean):
            return Mean(
                lax.psum(x.total, manual_axes()), lax.psum(x.count, manual_axes())
            )
        # A weight is the same everywhere, even where it is typed as varying.
        return lax.pmean(vary(x), manual_axes()) if varying(x) else x

    return map_means(fix, tree)


def _next_state(before: nnx.State, model: nnx.Module) -> nnx.State:
    """Returns the model's state after the forward, in the structure of ``before``."""
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))))
    kept = [(path, after[path]) for path, _ in nnx.to_flat_state(before)]
    return nnx.from_flat_state(kept)


def _typed_as(
    before: nnx.State, after: nnx.State, run: Callable, inputs: tuple
) -> nnx.State:
    """Returns ``after``, made by ``run(*inputs)``, with the mesh types of ``before``.

    Raises:
      UserError: ``after`` differs by device where ``before`` does not.
    """
    flat = dict(nnx.to_flat_state(after))
    retyped = [
        path
        for path, variable in nnx.to_flat_state(before)
        if varying(flat[path].get_value()) - varying(variable.get_value())
        and not isinstance(variable, (nnx.RngKey, nnx.RngCount))
    ]
    if not retyped:
        return after

    def values(*inputs: Any) -> list[jax.Array]:
        state = dict(nnx.to_flat_state(run(*inputs)[1][2]))
        return [state[path].get_value() for path in retyped]

    # Of (params, frozen, state, batch, index) only the batch differs by device.
    given = zip(inputs, (False, False, False, True, False), strict=True)
    differs = differing(values, *given)
    for path, differ in zip(retyped, differs, strict=True):
        if differ:
            name = ".".join(map(str, path))
            raise UserError(
                f"model state {name!r} ends the step different on each device; reduce "
                "what it is computed from with jshard.pmean (nnx.BatchNorm: leave "
                "axis_name out)"
            )
        flat[path] = flat[path].copy(of_first_device(flat[path].get_value()))
    return nnx.from_flat_state(list(flat.items()))
