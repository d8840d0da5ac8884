"""A step whose micro-batches pass the stages of a pipeline."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.layout.microbatches import Micro
from jshard.sharding.pipeline.call import SplitProgram, split_program
from jshard.sharding.pipeline.device import Stage
from jshard.sharding.settings.loss import Loss, Mean, Means, seeds
from jshard.sharding.settings.maximum import combined
from jshard.sharding.settings.mesh import PIPE
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.loss_counts import count
from jshard.sharding.step.program.traced import Forward
from jshard.system.errors import UserError


def pipelined(
    forward: Forward,
    arrays: ModelArrays,
    micro: Micro,
    dtypes: nnx.State,
    scale: jax.Array | None,
) -> tuple[nnx.State, Means, list[Any], nnx.State]:
    """Does what ``micro_batches`` does, with the Stack's layers in stages.

    Raises:
      UserError: counts or state depend on the layers; or as ``split_program``.
    """
    if any(forward.needs.params):
        raise UserError(
            "mesh: pipe: a count of the loss depends on what is trained, and must be "
            "known before the layers run; leave pipe out of the mesh, or return "
            "jshard.Mean(a / b, 1) of a, b = jshard.pmean((total, count)), with "
            "accumulate=1"
        )
    params, structure = jax.tree.flatten(arrays.params)
    split = split_program(forward.program, len(params))
    without_layers = forward._replace(run=_without_layers(split, forward.shapes))
    first = count(without_layers, arrays, micro, of_stages=True)
    loss, *_ = forward.shapes
    terms = zip(first.weights, (mean for _, mean in loss.terms), strict=True)
    of_totals, _ = seeds(Loss(tuple(terms)), first.counts, first.totals, scale)
    frozen = jax.tree.leaves(arrays.frozen)
    stage = Stage(split, forward.shapes, params, frozen, of_totals)
    grads, found = stage.scan((first.states, *micro), jax.tree.leaves(dtypes))
    # Only the last stage has them.
    of_last = lambda x: lax.psum(x, PIPE)
    totals, metrics = combined(of_last, lambda x: x.over(PIPE), found)
    loss = Loss(tuple(zip(first.weights, map(Mean, totals, first.counts), strict=True)))
    grads = jax.tree.unflatten(structure, grads)
    return grads, Means(loss, metrics), first.counts, first.after


def _without_layers(split: SplitProgram, shapes: Any) -> Callable[..., list[Any]]:
    """Returns the program with zeros for what the Stack returns.

    What counts, weights of the loss and the next state take is the same in each stage.
    """
    number = len(split.of_layers)
    loss, _, _, after = jax.tree.unflatten(jax.tree.structure(shapes), range(number))
    of_terms = [(weight, mean.count) for weight, mean in loss.terms]
    if any(split.of_layers[i] for i in jax.tree.leaves((of_terms, after))):
        raise UserError(
            "mesh: pipe: a count or weight of the loss, or the next state of a module "
            "(nnx.BatchNorm, say), is computed from what the Stack returns, and must "
            "be known before; compute it from the batch, or leave pipe out of the mesh"
        )
    carry = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(split.call.carry)]
    return lambda *inputs: split.after(*inputs, *carry)
