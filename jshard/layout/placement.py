"""The placement of one parameter: its sharding, memory and communication dtypes."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding, memory and communication dtypes of one parameter.

    Attributes:
      dim: the sharded dimension, counted from the end (-1 is the last), so that it is
        the same for one layer and for a stack of layers; None if replicated.
      gather: the dtype communicated by the all-gather; None for the parameter's dtype.
      compute: the dtype passed to the layer; None for the gathered dtype.
      reduce: the dtype communicated by the reduce-scatter; None for the gradient's
        dtype.
      sum: the dtype of the sums over "fsdp"; None for the communicated dtype.
      trainable: whether a gradient is computed and reduce-scattered.
      hosted: whether shards are in host memory (``memory_kinds.typed_as_device``).
      float8: whether products with it may be in float8 (``Precision.products``).
      scale: for a parameter that is gathered for float8 products, the index of its
        scale in the last of its unit's arrays.
    """

    dim: int | None
    gather: Any = None
    compute: Any = None
    reduce: Any = None
    sum: Any = None
    trainable: bool = True
    hosted: bool = False
    float8: bool = False
    scale: int | None = None

    def fetched(self, shard: jax.Array) -> jax.Array:
        """Returns the shard in device memory, copying it from the host if hosted."""
        return jax.device_put(shard, jax.memory.Space.Device) if self.hosted else shard
