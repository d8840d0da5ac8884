"""Tests of a user's step: its values against one device's, its program by a contract.

``check_step`` compares loss and gradients, ``assert_plan`` collectives and memory.
"""

import warnings
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
import optax
from flax import nnx

from jshard.plan.step_contract import assert_plan as assert_plan
from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.loss import as_loss
from jshard.sharding.settings.mesh import make_mesh
from jshard.sharding.settings.policy import Policy
from jshard.sharding.step.fsdp import FSDP
from jshard.sharding.step.program.draws import with_rngs
from jshard.sharding.units.model import decide_for_training

# The gradient of a parameter may be nothing but rounding (a bias before a norm's mean):
# it is measured against this part of the largest gradient at least.
_SMALLEST = 1e-2


@own_mesh()
def check_step(
    fsdp: FSDP,
    make_model: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    seed: int = 0,
    wrt: Any = nnx.Param,
    tolerance: float = 1e-3,
) -> None:
    """Checks that loss and gradients of a step are those of a single device.

    The model is made twice, with the same values: sharded as ``fsdp`` says, and on the
    first device of its mesh. There the reference is JAX's own gradient of the loss,
    ``loss_fn(model, batch).compute()``; if the policy has precisions, it is jshard's
    step with these alone. It is for small models, in one process; in float64 rounding
    hides nothing.

    Args:
      fsdp: the mesh and policy to check.
      make_model: as for ``FSDP.init``.
      loss_fn: as for ``FSDP.train_step``.
      batch: the global batch, in arrays of the host.
      seed: the seed of the random streams.
      wrt: an NNX filter that selects the parameters to train.
      tolerance: the largest difference of the losses, relative to one device's, and of
        the entries of a parameter's gradient, relative to the largest of them.

    Raises:
      AssertionError: they differ; names the parameter whose gradient differs most. Or
        the model has other parameters on the mesh than on one device.
      UserError: as ``FSDP.init`` and the step.
    """
    overrides = {
        modules: {name: value for name, value in knobs.items() if name == "precision"}
        for modules, knobs in fsdp.policy.overrides.items()
    }
    alone = FSDP(
        make_mesh(fsdp=1, devices=[fsdp.mesh.devices.flat[0]]),
        Policy(precision=fsdp.policy.precision, overrides=overrides),
        units=fsdp.layer_dims or fsdp.units,
        tensor_splits={".".join(p): split for p, split in fsdp.tensor_splits.items()},
    )
    given = (make_model, loss_fn, batch, seed, wrt)
    loss, grads = _loss_and_grads(fsdp, *given)
    plain = alone.policy == Policy()
    wanted, wanted_grads = (_of_jax if plain else _loss_and_grads)(alone, *given)
    chex.assert_trees_all_equal_shapes(grads, wanted_grads)
    largest = {name: float(np.max(np.abs(g))) for name, g in wanted_grads.items()}
    least = _SMALLEST * max(largest.values(), default=0.0) or 1.0
    errors = {
        name: float(np.max(np.abs(grads[name] - g))) / max(largest[name], least)
        for name, g in wanted_grads.items()
    }
    errors = {name: np.nan_to_num(e, nan=np.inf) for name, e in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    close = abs(loss - wanted) <= tolerance * abs(wanted)
    if close and errors[worst] <= tolerance:
        return
    mesh = ", ".join(f"{axis}={size}" for axis, size in fsdp.mesh.shape.items())
    raise AssertionError(
        f"check_step: on {mesh} the loss is {loss:.6g}, and on one device "
        f"{wanted:.6g}; the gradient of {worst!r} differs most, by {errors[worst]:.2g} "
        f"of its largest entry (tolerance {tolerance:g})"
    )


def _loss_and_grads(
    fsdp: FSDP, make_model: Any, loss_fn: Any, batch: Any, seed: int, wrt: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the loss of a step, and the gradients by the parameters' names."""
    keep = optax.trace(decay=0.0)  # its state is the gradients
    state = fsdp.init(make_model, keep, seed=seed, wrt=wrt)
    with warnings.catch_warnings():  # of what this very check is for
        warnings.filterwarnings("ignore", "mesh: tensor: is '.*' linear in sums")
        step = fsdp.train_step(loss_fn, keep)
        state, metrics = step(state, fsdp.shard_batch(batch))
    return float(metrics["loss"]), _named(fsdp.fetch(state.opt_state.trace))


def _of_jax(
    alone: FSDP, make_model: Any, loss_fn: Any, batch: Any, seed: int, wrt: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Returns what ``_loss_and_grads`` does, without a step of jshard."""
    state = alone.init(make_model, optax.identity(), seed=seed, wrt=wrt)
    model = alone.model(state)
    decide_for_training(model)
    graphdef, params, rest = nnx.split(model, wrt, ...)
    batch = alone.shard_batch(batch)
    loss_fn, batch, _ = with_rngs(loss_fn, batch, None, 0, state.step)

    @jax.jit
    @jax.value_and_grad
    def run(params: nnx.State) -> jax.Array:
        result = loss_fn(nnx.merge(graphdef, params, rest, copy=True), batch)
        return as_loss(result[0] if isinstance(result, tuple) else result).compute()

    loss, grads = run(params)
    return float(loss), _named(grads)


def _named(grads: Any) -> dict[str, np.ndarray]:
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(grads)
    }
    return {
        name.removesuffix(".value"): np.asarray(x, np.float64)
        for name, x in named.items()
    }
