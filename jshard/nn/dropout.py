"""Dropout whose masks do not depend on the mesh, and plain streams that must differ."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.comm.varying import vary
from jshard.mesh import manual_axes


class DropoutKey(nnx.Variable):
    """The base key of one Dropout, drawn when it is made."""


class DropoutCount(nnx.Variable):
    """How often a Dropout was called: the step, where it is called once a step."""


def is_random(variable: nnx.Variable) -> bool:
    """Whether a variable is part of a random stream."""
    return isinstance(variable, nnx.RngState | DropoutKey | DropoutCount)


class Dropout(nnx.Module):
    """Dropout with one mask for each example, keyed by its place in the global batch.

    The key is folded from the module's own key, the number of calls, and the example's
    global index: masks are bitwise equal on every mesh, with any number of
    micro-batches, and without jshard. The leading dimension of the input is the batch.

    Args:
      rate: probability of dropping a value.
      deterministic: if True the input is returned as it is (``model.eval()`` sets it).
      rngs: random streams; "dropout" gives the key.
    """

    def __init__(self, rate: float, *, deterministic: bool = False, rngs: nnx.Rngs):
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate={rate} must be in [0, 1)")
        self.rate = rate
        self.deterministic = deterministic
        self.key = DropoutKey(rngs.dropout())
        self.count = DropoutCount(jnp.zeros((), jnp.uint32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Drops values of ``x``, (batch, ...), and scales the rest by 1/(1-rate)."""
        if self.deterministic or self.rate == 0:
            return x
        count = self.count.get_value()
        self.count.set_value(count + 1)
        key = jax.random.fold_in(self.key.get_value(), count)
        examples = _first_example(x.shape[0]) + jnp.arange(x.shape[0], dtype=jnp.uint32)

        def mask(example: jax.Array) -> jax.Array:
            return jax.random.bernoulli(
                jax.random.fold_in(key, example), 1 - self.rate, x.shape[1:]
            )

        keep = jax.vmap(mask)(examples)
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)


# (index, number) of the micro-batch being traced.
_microbatch = contextvars.ContextVar[tuple[Any, int]]("microbatch", default=(0, 1))


@contextlib.contextmanager
def microbatch(index: Any, number: int) -> Iterator[None]:
    """Tells Dropout, while a step is traced, which micro-batch this is."""
    token = _microbatch.set((index, number))
    try:
        yield
    finally:
        _microbatch.reset(token)


def device_index() -> jax.Array | int:
    """This device's position in the batch: 0 outside a step."""
    axes = manual_axes()
    return lax.axis_index(axes) if axes else 0


def _first_example(local: int) -> Any:
    index, number = _microbatch.get()
    first = (device_index() * number + index) * local
    return jnp.asarray(first, jnp.uint32)


def fold_streams(state: nnx.State, index: Any) -> nnx.State:
    """Folds device and micro-batch into plain NNX random streams.

    Without it every device would draw the same mask for its different examples.
    """
    device = vary(jnp.asarray(device_index(), jnp.uint32))

    def fold(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, nnx.RngKey):
            return variable
        keys = variable.get_value()

        def one(key):
            return jax.random.fold_in(jax.random.fold_in(key, device), index)

        folded = jax.vmap(one)(keys.reshape(-1)).reshape(keys.shape)
        return variable.copy(folded)

    return jax.tree.map(fold, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


def plain_streams(model: nnx.Module) -> list[str]:
    """Paths of the random streams whose draws depend on the mesh."""
    return [
        ".".join(map(str, path[:-1]))
        for path, value in nnx.iter_graph(model)
        if isinstance(value, nnx.RngKey)
    ]


def merge_state(
    before: nnx.State, after: nnx.State, *, last: bool | jax.Array = True
) -> nnx.State:
    """The model state that the next micro-batch (or step, if ``last``) starts from.

    Keys stay as they were stored; within a step every micro-batch counts its draws
    from the same start, since its index is already in the masks.
    """

    def pick(old: nnx.Variable, new: nnx.Variable) -> nnx.Variable:
        if isinstance(old, (nnx.RngKey, DropoutKey)):
            return old
        if isinstance(old, (nnx.RngCount, DropoutCount)) and last is not True:
            value = jnp.where(last, new.get_value(), old.get_value())
            return old.copy(value)
        return new

    return jax.tree.map(
        pick, before, after, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
