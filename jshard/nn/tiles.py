"""A layer applied to a few tokens at a time, so that few activations exist at once.

Where sequences are very long, the hidden activations of one MLP alone may fill the
memory (Arctic Long Sequence Training, Bekman et al. 2025, arXiv:2506.13996, section
3.1.1).

Shape suffixes: B batch, T time, D width, N tiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.settings.precision import at_least_float32


def tiled(
    fn: Callable[[Any, jax.Array], jax.Array],
    module: Any,
    x_BTD: jax.Array,
    tokens: int,
) -> jax.Array:
    """Computes ``fn(module, x)``, which treats each token alone, in tiles along T.

    The backward computes each tile again, and sums the gradients of the module's
    parameters over tiles in float32 or wider.

    Args:
      fn: maps (B, T', D) to an array of (B, T', ...).
      module: what ``fn`` reads parameters of; a module or a tuple of modules.
      x_BTD: the input.
      tokens: the most tokens of a tile; T is split into the fewest equal tiles of so
        many. 0 is all.
    """
    B, T = x_BTD.shape[:2]
    number = -(-B * T // tokens) if tokens else 1
    number = next(n for n in range(min(number, T), T + 1) if T % n == 0)
    if number == 1:
        return fn(module, x_BTD)
    graphdef, state = nnx.split(module)
    wide_state = jax.tree.map(at_least_float32, state)

    @jax.checkpoint
    def one(x_BtD: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide_state, state)
        return fn(nnx.merge(graphdef, narrow), x_BtD)

    x_NBtD = jnp.moveaxis(x_BTD.reshape(B, number, -1, *x_BTD.shape[2:]), 1, 0)
    y_NBtD = lax.map(one, x_NBtD)
    y_BNtD = jnp.moveaxis(y_NBtD, 0, 1)
    return y_BNtD.reshape(B, T, *y_BNtD.shape[3:])
