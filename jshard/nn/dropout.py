"""Dropout with masks that do not depend on the mesh; plain NNX random streams."""

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


class Dropout(nnx.Module):
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
        self.deterministic = deterministic
        self.key = DropoutKey(rngs.dropout())
        self.count = DropoutCount(jnp.zeros((), jnp.uint32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Drops values of ``x``, (batch, ...), and scales the rest by 1/(1-rate)."""
        if self.deterministic or self.rate == 0:
            return x
        if within_tensor_parallel():
            raise UserError(
                "Dropout: within tensor_parallel a device has some features of some "
                "examples, so masks would depend on the mesh; drop behind it"
            )
        count = self.count.get_value()
        self.count.set_value(count + 1)
        key = jax.random.fold_in(self.key.get_value(), count)
        index, number = current_microbatch()
        first = jnp.asarray(index * x.shape[0], jnp.uint32)
        own = first + jnp.arange(x.shape[0], dtype=jnp.uint32)
        examples = in_batch(own, number * x.shape[0])

        parts = context_size() if x.ndim > 1 else 1
        shape = (x.shape[1] * parts, *x.shape[2:]) if parts > 1 else x.shape[1:]

        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, examples)
        mask = lambda key: jax.random.bernoulli(key, 1 - self.rate, shape)
        keep = jax.vmap(mask)(keys)
        if parts > 1:  # this device's part of the mask of whole sequences
            start = lax.axis_index(sequence_axes()) * x.shape[1]
            keep = lax.dynamic_slice_in_dim(keep, start, x.shape[1], axis=1)
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)
