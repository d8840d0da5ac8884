"""The micro-batch that is traced, and sums over all of a step's."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.fsdp.mesh import manual_axes

# (index, number) of the micro-batch being traced.
_microbatch = contextvars.ContextVar[tuple[Any, int]]("microbatch", default=(0, 1))


@contextlib.contextmanager
def microbatch(index: Any, number: int) -> Iterator[None]:
    """Sets the micro-batch, ``index`` of ``number``, while it is traced."""
    token = _microbatch.set((index, number))
    try:
        yield
    finally:
        _microbatch.reset(token)


def current_microbatch() -> tuple[Any, int]:
    """Returns the index of the micro-batch, and how many a step has."""
    return _microbatch.get()


def step_sum(so_far: nnx.Variable, x: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
    """Adds up integers over the devices and micro-batches of a step.

    Outside of a step, each call is one with one device and micro-batch.

    Args:
      so_far: model state for the sums of earlier micro-batches, in the shape of ``x``;
        it is zero between steps.
      x: this device's integers, of this micro-batch.

    Returns:
      The sum so far, and whether it is that of the whole step.
    """
    axes, (index, number) = manual_axes(), _microbatch.get()
    before = so_far.get_value()
    x = x.astype(before.dtype)
    total = before + (lax.psum(x, axes) if axes else x)
    last = index == number - 1
    so_far.set_value(jnp.where(last, 0, total))
    return total, last
