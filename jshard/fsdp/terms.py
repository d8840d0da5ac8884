"""The terms of a step's loss: read from ``loss_fn``, seeded, and summed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.errors import UserError
from jshard.fsdp.mesh import manual_axes
from jshard.fsdp.precision import at_least_float32
from jshard.nn.loss import Loss, Mean, divide, fold_weights, map_means, split_result


def terms_of(result: Any) -> tuple[Loss, dict[str, Mean], list[jax.Array]]:
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


def seeds(
    loss: Loss, counts: list[jax.Array], scale: jax.Array | None
) -> list[jax.Array]:
    """Returns the cotangent of each total: its weight / global count, times scale."""
    found = []
    for (weight, mean), count in zip(loss.terms, counts, strict=True):
        seed = divide(weight, count)
        seed = seed if scale is None else seed * scale
        found.append(seed.astype(mean.total.dtype))
    return found


def over_devices(tree: Any) -> Any:
    """Sums totals and counts over all devices; weights are the same on each."""
    axes = manual_axes()

    def add_up(x: Any) -> Any:
        if not isinstance(x, Mean):
            return x
        return Mean(lax.psum(x.total, axes), lax.psum(x.count, axes))

    return map_means(add_up, tree)
