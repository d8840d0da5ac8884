"""A learning rate by step, for the metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 1024  # steps


def by_step(schedule: Callable[[Any], Any]) -> Callable[[int], float]:
    """Returns a schedule as a function from a step to a number.

    A schedule of optax is some ten operations for the devices, which would wait behind
    the steps under way: half a millisecond of every step. They are computed for many
    steps at once, which are the same ones wherever a run resumes.
    """
    traced = jax.jit(jax.vmap(schedule))
    try:
        is_array = isinstance(schedule(0), jax.Array)
        jax.eval_shape(traced, jax.ShapeDtypeStruct((_CHUNK,), jnp.int32))
    except (TypeError, IndexError):  # of JAX: Python code that cannot be traced
        is_array = False
    if not is_array:
        return lambda step: float(schedule(step))
    first = -_CHUNK
    rates: Sequence[float] = ()

    def rate(step: int) -> float:
        nonlocal first, rates
        if not first <= step < first + _CHUNK:
            first = step - step % _CHUNK
            rates = np.asarray(traced(jnp.arange(first, first + _CHUNK))).tolist()
        return rates[step - first]

    return rate
