"""The update that ends a step: optimizer, parameters, averages."""

import functools
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from jshard import ema, loss_scale
from jshard.offload import one_layer
from jshard.optim import sharded_update
from jshard.partition import by_parameter
from jshard.policy import Policy
from jshard.streamed_update import streamed_update

# (parameters, optimizer's state, averages or None)
Moving = tuple[nnx.State, Any, nnx.State | None]
# (gradients, updates made after this one, whether to make it; None is yes)
Given = tuple[nnx.State, jax.Array, jax.Array | None]


def update(
    mesh: Mesh,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    moving: Moving,
    given: Given,
) -> Moving:
    """One update, on globally-shaped arrays sharded like their parameters.

    Arrays in host memory (``Policy.offload``) are streamed through it.

    Raises:
      UserError: the state and the policy do not agree on averages, or there are arrays
        in host memory and the optimizer does not treat layers independently.
    """
    plain = functools.partial(_update, mesh, policy, optimizer)
    if policy.offload is None:
        return plain(moving, given)
    params, _, averages = moving
    grads, *others = given
    layer = one_layer(params)
    cut = (
        layer,
        jax.eval_shape(optimizer.init, layer),
        None if averages is None else jax.eval_shape(ema.start, layer),
    )
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    cut_given = (one_layer(grads), *jax.tree.map(abstract, others))
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    owners = jax.tree.leaves(by_parameter(moving, params, names, "its own state"))
    return streamed_update(plain, moving, given, (cut, cut_given), owners)


def _update(
    mesh: Mesh,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    moving: Moving,
    given: Given,
) -> Moving:
    params, opt_state, averages = moving
    grads, steps, finite = given
    with sharded_update(mesh, policy):
        updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new = (params, opt_state, ema.update(averages, params, policy.ema_decay, steps))
    return new if finite is None else loss_scale.select(finite, new, moving)
