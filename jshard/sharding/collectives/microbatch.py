"""The micro-batch that is traced, and sums over all of a step's."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.settings.mesh import manual_axes

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


class StepSum(nnx.Variable):
    """Integers added up over the devices and micro-batches of a step.

    The value is what earlier micro-batches of the step have added; it is zero between
    steps. Outside of a step, each call is one with one device and micro-batch.
    """

    def add(self, x: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
        """Adds this device's integers, in the shape of the value.

        Returns:
          The sum so far, and whether it is that of the whole step.
        """
        axes, (index, number) = manual_axes(), _microbatch.get()
        before = self.get_value()
        x = x.astype(before.dtype)
        total = before + (lax.psum(x, axes) if axes else x)
        last = index == number - 1
        self.set_value(jnp.where(last, 0, total))
        return total, last
