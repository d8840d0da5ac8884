"""A step whose micro-batches pass the stages of a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.sharding.layout.microbatches import Micro
from jshard.sharding.layout.values.random_streams import merge_state
from jshard.sharding.pipeline.call import Split, split_program
from jshard.sharding.pipeline.device import Stage, pick
from jshard.sharding.settings.count import add_up, sum_of
from jshard.sharding.settings.loss import Loss, Mean, seeds
from jshard.sharding.settings.maximum import Max, combined
from jshard.sharding.settings.mesh import PIPE, manual_axes
from jshard.sharding.settings.state import ModelArrays
from jshard.system.compat.jaxprs import without_dead_code
from jshard.system.errors import UserError


def pipelined(
    traced: core.ClosedJaxpr,
    shapes: Any,
    arrays: ModelArrays,
    micro: Micro,
    dtypes: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Loss, dict[str, Mean | Max], nnx.State]:
    """Does what ``accumulate`` does, with the Stack's layers in stages.

    Args:
      traced: ``run(params, frozen, state, batch, index)`` of a micro-batch, traced.
      shapes: its abstract results: the loss, the named Means, the weights of terms that
        the step computes, and the next state.
      arrays: as one device of a stage has them.
      micro: the stage's micro-batches.
      dtypes: those in which gradients are added up.
      scale: scales the loss in the backward; None is 1.

    Raises:
      UserError: counts or state depend on the layers; or as ``split_program``.
    """
    params, structure = jax.tree.flatten(arrays.params)
    split = split_program(traced, len(params))
    states, weights, counts, after = _without_layers(split, shapes, arrays, micro)
    terms = zip(weights, (mean for _, mean in shapes[0].terms), strict=True)
    stage = Stage(
        split,
        shapes,
        params,
        jax.tree.leaves(arrays.frozen),
        seeds(Loss(tuple(terms)), counts, [None] * len(counts), scale)[0],
    )
    grads, (means, metrics) = stage.scan((states, *micro), jax.tree.leaves(dtypes))
    # Only the last stage has them.
    of_last = lambda x: lax.psum(x, PIPE)
    largest = lambda x: x.over(PIPE)
    means, metrics = combined(of_last, largest, (means, metrics))
    loss = Loss(tuple(zip(weights, means, strict=True)))
    return jax.tree.unflatten(structure, grads), loss, metrics, after


def _without_layers(
    split: Split, shapes: Any, arrays: ModelArrays, micro: Micro
) -> tuple[nnx.State, list, list, nnx.State]:
    """Runs what needs no layers, which is the same in each stage.

    Returns the state before each micro-batch; the weights of the loss's terms, and
    their global counts; and the state after the step.
    """
    loss, _, _, after = jax.tree.unflatten(
        jax.tree.structure(shapes), range(len(split.of_layers))
    )
    of_terms = [weight for weight, _ in loss.terms], [m.count for _, m in loss.terms]
    wanted = jax.tree.leaves((of_terms, after))
    if any(split.of_layers[i] for i in wanted):
        raise UserError(
            "mesh: pipe: a count or weight of the loss, or the next state of a module "
            "(nnx.BatchNorm, say), is computed from what the Stack returns, and must "
            "be known before; compute it from the batch, or leave pipe out of the mesh"
        )
    carry = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(split.call.carry)]
    last = len(micro[1]) - 1
    run = without_dead_code(lambda *inputs: pick(split.after(*inputs, *carry), wanted))

    def one(state, slices):
        inputs = jax.tree.leaves((*arrays[:2], state, *slices))
        found = jax.tree.unflatten(jax.tree.structure((of_terms, after)), run(*inputs))
        _, index = slices
        return merge_state(state, found[1], last=index == last), (state, *found[0])

    after, (states, weights, counts) = lax.scan(one, arrays.model_state, micro)
    counts = [add_up(sum_of(count), manual_axes()) for count in counts]
    return states, [weight[0] for weight in weights], counts, after
