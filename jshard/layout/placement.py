"""Where one parameter lives and how it travels."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lives and how it travels.

    Attributes:
      dim: the sharded dimension, counted from the end (-1 is the last), so that it
        holds for one layer and for a stack of layers alike; None is replicated.
      gather: dtype on the wire of the all-gather; None is the parameter's own.
      compute: dtype the layer sees; None is the one it arrived in.
      reduce: dtype on the wire of the reduce-scatter; None is the gradient's own.
      sum: dtype of the sums over "fsdp"; None is that on the wire.
      trainable: whether a gradient is computed and scattered.
      hosted: whether shards are in host memory (``offload.typed_as_device``).
    """

    dim: int | None
    gather: Any = None
    compute: Any = None
    reduce: Any = None
    sum: Any = None
    trainable: bool = True
    hosted: bool = False

    def fetched(self, shard: jax.Array) -> jax.Array:
        """The shard in device memory."""
        return jax.device_put(shard, jax.memory.Space.Device) if self.hosted else shard
