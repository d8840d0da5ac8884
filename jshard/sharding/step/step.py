"""Steps: what ``FSDP`` jits, and what one device does in it, inside ``shard_map``.

There each value belongs to one device, and nothing is summed over devices unless a line
says so. The backward starts from weight / global count, so that no sum over tokens ever
grows large, and each gradient ends with the layout of its parameter.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from jshard.sharding.axes.tensor import make_parallel
from jshard.sharding.collectives.counted import counts_here, only_first
from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.collectives.microbatch import microbatch
from jshard.sharding.collectives.reduce import all_reduce, scatter
from jshard.sharding.layout.batch import batch_specs, check_batch
from jshard.sharding.layout.memory_kinds import typed_as_device
from jshard.sharding.layout.microbatches import first_of, split
from jshard.sharding.layout.placement import Placement
from jshard.sharding.layout.splits import Split
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.values.random_streams import (
    fold_streams,
    merge_state,
    unfold_streams,
)
from jshard.sharding.layout.variables import variables
from jshard.sharding.pipeline.call import leave_open
from jshard.sharding.pipeline.moves import from_stages, to_stages
from jshard.sharding.pipeline.stages import divide
from jshard.sharding.settings.count import add_up
from jshard.sharding.settings.in_stages import in_stages
from jshard.sharding.settings.loss import Means, over_devices, seeds, terms_of
from jshard.sharding.settings.mesh import (
    examples_spec,
    manual_axes,
    mesh_axes,
    split_sequences,
    stages_of,
)
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import at_least_float32
from jshard.sharding.settings.state import ModelArrays, TrainState
from jshard.sharding.step.accumulate import micro_batches
from jshard.sharding.step.checks import check_fields
from jshard.sharding.step.pipelined_step import pipelined
from jshard.sharding.step.program.draws import with_rngs
from jshard.sharding.step.program.refusals import check_apart, check_means
from jshard.sharding.step.program.told import (
    say_what_is_written,
    tell_of_reads,
    written,
)
from jshard.sharding.step.program.traced import (
    Forward,
    differing,
    once_checked,
    tracing,
)
from jshard.sharding.units.calls import own_containers
from jshard.sharding.units.model import (
    decide_for_training,
    gather_root,
    make_sharded,
    make_units,
    root_as_unit,
)
from jshard.sharding.update.end_of_step import check_state, next_state
from jshard.system.compat.jaxprs import replay

LossFn = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of an ``FSDP``, as functions of a state and a batch: global arrays.

    Attributes:
      mesh: the Mesh or AbstractMesh.
      policy: what is gathered, kept and reduced.
      units: types that become Units.
      splits: what is split of modules that do not say so, by path.
      sequences: the names of a batch's sequences, as of ``FSDP``.
    """

    mesh: Any
    policy: Policy
    units: tuple[type, ...]
    splits: Mapping[tuple[str, ...], Split]
    sequences: tuple[str, ...] | None

    def layout(self, state: TrainState) -> Layout:
        """Returns a state's layout; raises UserError if it is not like its model."""
        check_fields(state)
        layout = Layout.of(state, self.policy, self.mesh, self.splits)
        layout.check_memory(state)
        return dataclasses.replace(layout, sequences=self.sequences)

    def model(
        self, graphdef: nnx.GraphDef, layout: Layout, *arrays: nnx.State, training: bool
    ) -> nnx.Module:
        """Returns the model on one device, whose units gather their shards.

        In training the policy may make the root a unit, too (``reshard_root``);
        otherwise it is gathered here. Modules train as they were given.
        """
        model = nnx.merge(graphdef, *arrays, copy=True)
        own_containers(model)
        if training:
            decide_for_training(model)
        else:
            model.eval()
        make_parallel(model, self.splits)
        make_units(model, self.units)
        stages = layout.stages
        run_layers = stages and functools.partial(leave_open, stages=stages)
        make_sharded(model, layout.policy, layout.places, run_layers)
        if not training or layout.policy.reshard_root is False:
            gather_root(model)
        return model

    def train(
        self,
        loss_fn: LossFn,
        seed: int,
        optimizer: optax.GradientTransformation,
        state: TrainState,
        batch: Any,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the next state, and the step's metrics."""
        layout, policy, mesh = self.layout(state), self.policy, self.mesh
        check_batch(batch, mesh, accumulate=policy.accumulate)
        check_state(state, policy, optimizer)
        specs = batch_specs(batch, mesh, self.sequences)
        loss_fn, batch, specs = with_rngs(loss_fn, batch, specs, seed, state.step)
        model_of = functools.partial(self.model, state.graphdef, training=True)
        of_root = root_as_unit(loss_fn, policy.reshard_root)
        local = functools.partial(gradients, model_of, of_root, layout)
        same = PartitionSpec()
        out_specs = layout.local_specs.params, same, same
        run = _on_devices(local, layout, (specs, same), out_specs)
        scale = state.loss_scale and state.loss_scale.scale
        with split_sequences(), in_stages(stages_of(mesh)):
            grads, metrics, after = run(_arrays(state), batch, scale)
        new, more = next_state(layout, optimizer, state, grads, after, metrics["loss"])
        return layout.constrain(new), metrics | more

    def evaluate(
        self,
        loss_fn: LossFn,
        seed: int,
        examples: int | None,
        state: TrainState,
        batch: Any,
    ) -> Means:
        """Returns the Means of ``loss_fn`` over all, or the first, ``examples``."""
        layout = self.layout(state)
        check_batch(batch, self.mesh, counted=examples)
        specs = batch_specs(batch, self.mesh, self.sequences)
        loss_fn, batch, specs = with_rngs(loss_fn, batch, specs, seed, state.step)
        terms = lambda *inputs: (*terms_of(loss_fn(*inputs)), None)

        def local(arrays: ModelArrays, batch: Any) -> Means:
            traced, shapes = self._traced(terms, state, layout, arrays, batch)
            check_means(traced.jaxpr, shapes)
            forward = once_checked(traced, shapes, layout, arrays, (batch,))
            _, (means, _) = forward(*arrays, batch)
            if examples is not None:
                check_apart(traced.jaxpr, batch)
            return over_devices(means.where(counts_here()))

        with split_sequences(), only_first(examples):
            mapped = _on_devices(local, layout, (specs,), PartitionSpec())
            return mapped(_arrays(state), batch)

    def predict(self, fn: LossFn, seed: int, state: TrainState, batch: Any) -> Any:
        """Returns ``fn(model, batch)`` of the global batch."""
        layout = self.layout(state).whole()
        check_batch(batch, self.mesh, whole=True)
        specs = batch_specs(batch, self.mesh, whole=True)
        fn, batch, specs = with_rngs(fn, batch, specs, seed, state.step)

        def local(arrays: ModelArrays, batch: Any) -> Any:
            traced, shapes = self._traced(fn, state, layout, arrays, batch)
            differing(traced.jaxpr, layout, arrays, (batch,))
            return replay(traced, shapes)(*arrays, batch)

        mapped = _on_devices(local, layout, (specs,), examples_spec(self.mesh))
        return mapped(_arrays(state), batch)

    def _traced(
        self, fn: LossFn, state: TrainState, layout: Layout, arrays: Any, batch: Any
    ) -> tuple[core.ClosedJaxpr, Any]:
        """Traces ``fn(model, batch)`` on one device, in eval mode."""

        def run(params, frozen, model_state, batch):
            own = params, frozen, fold_streams(model_state, 0)
            return fn(self.model(state.graphdef, layout, *own, training=False), batch)

        with tracing() as reads:
            traced, shapes = jax.make_jaxpr(run, return_shape=True)(*arrays, batch)
        tell_of_reads(reads, traced)
        return traced, shapes


def _arrays(state: TrainState) -> ModelArrays:
    return jax.tree.map(typed_as_device, state.model_arrays)


def _on_devices(
    fn: Callable, layout: Layout, in_specs: tuple, out_specs: Any
) -> Callable:
    # Each value belongs to one device: nothing is summed unless a line says so.
    return jax.shard_map(
        fn,
        mesh=layout.mesh,
        axis_names=set(mesh_axes(layout.mesh)),
        check_vma=False,
        in_specs=(layout.local_specs, *in_specs),
        out_specs=out_specs,
    )


# One device, inside shard_map.


def gradients(
    model_of: Callable[..., nnx.Module],
    loss_fn: LossFn,
    layout: Layout,
    arrays: ModelArrays,
    batch: Any,
    scale: jax.Array | None,
) -> tuple[nnx.State, dict[str, jax.Array], nnx.State]:
    """Returns gradients, metrics and the next model state.

    Args:
      model_of: ``model_of(layout, params, frozen, model_state)`` makes the model.
      loss_fn: ``loss_fn(model, batch)``.
      layout: the state's layout.
      arrays: local shards, and the model state.
      batch: this device's examples, (examples, ...) each.
      scale: scales the loss in the backward; None is 1.
    """
    policy, of_state, shards = layout.policy, layout, arrays.params
    if stages_of(layout.mesh) > 1:
        stages = divide(arrays, layout.mesh, policy)
        arrays, batch, layout = to_stages(arrays, batch, layout, stages)
    sharded, layout = layout, layout.gathered()
    params, frozen = (_map_gathered_once(all_gather, x, sharded) for x in arrays[:2])
    arrays = ModelArrays(params, frozen, arrays.model_state)

    def run(params, frozen, state, batch, index=0):
        folded = fold_streams(state, index)
        model = model_of(layout, params, frozen, folded)
        given = {path: v.get_raw_value() for path, v in variables(model)}
        with microbatch(index, policy.accumulate):
            terms = terms_of(loss_fn(model, batch))
        after = unfold_streams(state, folded, _state_after(state, model))
        return *terms, after, written(model, given, arrays)

    micro = None
    if policy.accumulate > 1 or layout.stages:
        micro = split(batch, policy.accumulate)
    inputs = (batch,) if micro is None else first_of(micro)
    with tracing() as reads:
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*arrays, *inputs)
    traced, shapes = say_what_is_written(traced, shapes, layout, arrays)
    tell_of_reads(reads, traced)
    forward = once_checked(traced, shapes, layout, arrays, inputs)
    if policy.accumulate > 1:
        check_means(traced.jaxpr, shapes)

    places = of_state.places_of(shards)
    if micro is None:
        found = _whole_batch(forward, arrays, batch, scale)
    else:
        run_all = pipelined if layout.stages else micro_batches
        dtypes = jax.tree.map(_sum_dtype, shards, places)
        found = run_all(forward, arrays, micro, dtypes, scale)
    grads, means, counts, after = found

    grads = _map_gathered_once(scatter, grads, sharded)
    if layout.stages:
        grads = from_stages(grads, shards, of_state, layout.stages)
    grads = jax.tree.map(_sum_at_end, grads, places, shards)
    if scale is not None:
        # In float16 the scale may overflow, and the quotient underflow.
        grads = jax.tree.map(lambda g: at_least_float32(g) / scale, grads)
    means = over_devices(means, counts)
    metrics = {"loss": means.loss, **means.metrics}
    return grads, {name: mean.compute() for name, mean in metrics.items()}, after


def _whole_batch(
    forward: Forward, arrays: ModelArrays, batch: Any, scale: jax.Array | None
) -> tuple[nnx.State, Means, list[Any], nnx.State]:
    """Runs a device's examples at once.

    Returns gradients, Means, the global counts of the loss, and the next state.
    """
    rest, axes = (*arrays[1:], batch), manual_axes()
    _, pullback, (means, after) = jax.vjp(
        lambda params: forward(params, *rest), arrays.params, has_aux=True
    )
    terms = zip(means.loss.terms, forward.needs.params, strict=True)
    totals = [lax.psum(m.total, axes) if yes else None for (_, m), yes in terms]
    counts = [add_up(mean.count, axes) for _, mean in means.loss.terms]
    (grads,) = pullback(seeds(means.loss, counts, totals, scale))
    return grads, means, counts, merge_state(arrays.model_state, after)


def _map_gathered_once(fn: Callable, params: nnx.State, layout: Layout) -> nnx.State:
    """Applies ``fn(array, place)`` to the parameters that a step gathers once."""

    def apply(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        if not layout.gathered_once(path):
            return variable
        return variable.copy(fn(variable.get_value(), layout.places[path]))

    return nnx.map_state(apply, params)


def _sum_dtype(shard: jax.Array, place: Placement) -> Any:
    """Returns the dtype in which a shard's gradients are added up."""
    return jnp.promote_types(shard.dtype, place.gradient.sum or shard.dtype)


def _sum_at_end(grad: jax.Array, place: Placement, shard: jax.Array) -> jax.Array:
    """Returns a shard's gradient, summed over devices unless its unit did that."""
    if place.gradient.sum_at == "step":
        grad = all_reduce(grad, place)
    return grad.astype(shard.dtype)


def _state_after(before: nnx.State, model: nnx.Module) -> nnx.State:
    """Returns the model's state after the forward, in the structure of ``before``."""
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))))
    kept = [(path, after[path]) for path, _ in nnx.to_flat_state(before)]
    return nnx.from_flat_state(kept)
