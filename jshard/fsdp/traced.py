"""What a step's forward does, once traced: it is checked, and never traced again."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.compat.jaxprs import replay
from jshard.errors import UserError
from jshard.fsdp.equal import differing
from jshard.fsdp.mesh import manual_axes
from jshard.fsdp.state import ModelArrays
from jshard.layout.state_layout import Layout
from jshard.nn.dropout import merge_state
from jshard.unit.remat import check_names


def once_checked(
    traced: Any, shapes: Any, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> Callable:
    """Checks a forward, and returns it as a function.

    Args:
      traced: what ``jax.make_jaxpr`` made of ``run(params, frozen, state, batch,
        *index)``, which returns the loss, the named Means, the weights of terms that
        the step computes, and the next state or None.
      shapes: its abstract results.
      layout: of the parameters in ``arrays``.
      arrays: as one device has them.
      inputs: its examples, and maybe the index of the micro-batch.

    Returns:
      ``forward``, with the arguments of ``run``, which returns the totals of the loss's
      terms, and (loss, metrics, next state).

    Raises:
      UserError: a weight, or a part of the next state, may differ by device, or the
        policy names an activation that there is none of.
    """
    check_names(traced.jaxpr, layout.policy)
    differs = differing_results(traced.jaxpr, layout, arrays, inputs)
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
    run = replay(traced, shapes)

    def forward(*args: Any) -> tuple[list, tuple]:
        loss, metrics, _, after = run(*args)
        return [mean.total for _, mean in loss.terms], (loss, metrics, after)

    return forward


def differing_results(
    jaxpr: Any, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> list[bool]:
    """Returns whether each result of a step's program may differ by device.

    Scalars among ``inputs`` are the same on every device.

    Raises:
      UserError: collectives run under a condition that does.
    """
    names, axes = [], []
    for part in arrays[:2]:
        for path, _ in nnx.to_flat_state(part):
            names.append(".".join(map(str, path)))
            axes.append(layout.places[path].differs_over())
    axes += [()] * len(jax.tree.leaves(arrays.model_state))
    axes += [manual_axes() if np.ndim(x) else () for x in jax.tree.leaves(inputs)]
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
