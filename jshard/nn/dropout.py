"""Dropout and noise that do not depend on the mesh; plain NNX random streams."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.axes.tensor import within_tensor_parallel
from jshard.sharding.collectives.microbatch import current_microbatch
from jshard.sharding.layout.values.random_streams import (
    DropoutCount,
    DropoutKey,
    in_batch,
)
from jshard.sharding.settings.mesh import (
    context_size,
    sequence_axes,
)
from jshard.system.errors import UserError


class _PerExample(nnx.Module):
    """Draws arrays like a batch that are the same on every mesh.

    The key of an example is folded from the module's own key, the number of calls, and
    the example's index in the global batch.
    """

    def __init__(self, deterministic: bool, rngs: nnx.Rngs):
        self.deterministic = deterministic
        self.key = DropoutKey(rngs.dropout())
        self.count = DropoutCount(jnp.zeros((), jnp.uint32))

    def draw(
        self, x: jax.Array, sample: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    ) -> jax.Array:
        """Returns `sample(key, shape)` for each example of ``x``, (batch, ...)."""
        name = type(self).__name__
        if within_tensor_parallel():
            raise UserError(
                f"{name}: within tensor_parallel a device has some features of some "
                "examples, so masks would depend on the mesh; drop behind it"
            )
        count = self.count.get_value()
        self.count.set_value(count + 1)
        key = jax.random.fold_in(self.key.get_value(), count)
        index, number = current_microbatch()
        first = jnp.asarray(index * x.shape[0], jnp.uint32)
        own = first + jnp.arange(x.shape[0], dtype=jnp.uint32)
        examples = in_batch(own, number * x.shape[0])

        shape, parts = whole_example(x), context_size() if x.ndim > 1 else 1
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, examples)
        drawn = jax.vmap(lambda key: sample(key, shape))(keys)
        if parts > 1:  # this device's part of what is drawn for whole sequences
            start = lax.axis_index(sequence_axes()) * x.shape[1]
            drawn = lax.dynamic_slice_in_dim(drawn, start, x.shape[1], axis=1)
        return drawn


def whole_example(x: jax.Array) -> tuple[int, ...]:
    """Returns the shape of an example, with the parts of its sequence elsewhere."""
    length = x.shape[1:2]
    return (*(size * context_size() for size in length), *x.shape[2:])


class Dropout(_PerExample):
    """Dropout whose masks are the same on every mesh.

    The key of an example's mask is folded from the module's own key, the number of
    calls, and the example's index in the global batch. Masks are bitwise equal on every
    mesh, for any number of micro-batches, and without jshard.

    Args:
      rate: probability of dropping a value, in [0, 1).
      deterministic: if True, inputs are returned unchanged (``model.eval()`` sets it).
      rngs: random streams; "dropout" provides the key.

    Raises:
      ValueError: ``rate`` is out of range.
      UserError: (when called) it is within ``tensor_parallel``, with the axis.
    """

    def __init__(self, rate: float, *, deterministic: bool = False, rngs: nnx.Rngs):
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout: rate={rate} must be in [0, 1)")
        self.rate = rate
        super().__init__(deterministic, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Drops values of ``x``, (batch, ...), and scales the rest by 1/(1-rate)."""
        if self.deterministic or self.rate == 0:
            return x
        mask = lambda key, shape: jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(self.draw(x, mask), x / (1 - self.rate), 0).astype(x.dtype)


class EmbeddingNoise(_PerExample):
    """NEFTune: noise on embeddings in training (Jain et al. 2023, arXiv:2310.05914).

    It is uniform, of at most ``alpha / sqrt(length * width)``; the length is that of a
    row, padding included, as in transformers.
    """

    def __init__(self, alpha: float, *, rngs: nnx.Rngs):
        self.alpha = alpha
        super().__init__(False, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Adds the noise; after ``model.eval()``, none."""
        if self.deterministic:
            return x_BTD
        most = self.alpha / math.sqrt(math.prod(whole_example(x_BTD)))
        noise = lambda key, shape: jax.random.uniform(
            key, shape, jnp.float32, -most, most
        )
        return x_BTD + self.draw(x_BTD, noise).astype(x_BTD.dtype)
