"""The placement of one parameter: its sharding, its memory and its collectives."""

import dataclasses
from typing import Any, Literal

import jax

from jshard.sharding.layout.four_bit.codes import FourBit
from jshard.sharding.layout.padding import lengthened, shortened
from jshard.sharding.settings.mesh import names_of, shard_axes


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding, memory and collectives of one parameter.

    Inside a step a value belongs to one device, and so does the gradient of a gathered
    weight: a parameter's gradient is the sum of the devices' gradients. A
    reduce-scatter sums over the axes that shard ``dim``, and an all-reduce over
    ``sum_over``.

    Attributes:
      dim: the sharded dimension, counted from the end (-1 is the last), so that it is
        the same for one layer and for a stack of layers; None if replicated.
      four_bit: how the parameter is kept in 4 bits; None if it is not.
      decoded_to: the dtype that it has in the layer then.
      over: the mesh axes that shard ``dim``; None for all that shard parameters.
      splits: (dimension, axis) for each mesh axis that splits the parameter for
        computing; the layer gets the device's part of it.
      whole: whether the layer gets the full parameter in spite of ``splits``.
      parts: the number of parts of each shard at rest: a stage's devices have shards
        that are split further over "pipe".
      on_rank_zero: an axis on whose first device alone the layer gets the parameter,
        and zeros elsewhere: a bias that is added to partial sums.
      exact: the padded dimension, counted from the end, and its size without the
        padding; None if there is none. A device's part of what ``splits`` split along
        this dimension has the padding.
      gather: the dtype communicated by the all-gather; None for the parameter's dtype.
      compute: the dtype passed to the layer; None for the parameter's dtype.
      reduce: the dtype communicated by the reduce-scatter; None for the gradient's
        dtype.
      sum: the dtype of all sums over devices; None for the communicated dtype.
      sum_over: the axes over which devices have different gradients of the same shard.
      sum_at: when these are summed: after each backward of the unit, or once at the
        end of the step.
      trainable: whether a gradient is computed and reduce-scattered.
      hosted: whether shards are in host memory (``memory_kinds.typed_as_device``).
      float8: what products with it may be in (``Precision.products``); None otherwise.
      summed: the dimensions that these sum over, counted from the end.
      packed: the dimension along which bytes of four-bit values have two each, counted
        from the end; None if it is not gathered in these.
      gradient_only: whether the parameter is not gathered, and zeros take the gradient
        of a weight that is made otherwise (``jshard.sharding.float8.weights``).
    """

    dim: int | None
    exact: tuple[int, int] | None = None
    gather: Any = None
    compute: Any = None
    reduce: Any = None
    sum: Any = None
    sum_over: tuple[str, ...] = ()
    sum_at: Literal["unit", "step"] = "step"
    trainable: bool = True
    hosted: bool = False
    float8: str | None = None
    summed: tuple[int, ...] = ()
    packed: int | None = None
    gradient_only: bool = False
    four_bit: FourBit | None = None
    decoded_to: Any = None
    over: tuple[str, ...] | None = None
    splits: tuple[tuple[int, str], ...] = ()
    whole: bool = False
    parts: int = 1
    on_rank_zero: str | None = None

    def axes(self) -> str | tuple[str, ...]:
        """Returns the axes of the gathers and scatters along ``dim``."""
        if self.over is None:
            return shard_axes()
        first, *others = self.over
        return self.over if others else first

    def shards(self) -> int:
        """Returns the number of shards along ``dim``, inside ``shard_map``."""
        return 1 if self.dim is None else jax.lax.axis_size(self.axes())

    def differs_over(self) -> tuple[str, ...]:
        """Returns the axes over which devices have different parts of the parameter."""
        over = names_of(self.axes()) if self.dim is not None else ()
        apart = (axis for _, axis in self.splits)
        return (*over, *apart, *names_of(self.on_rank_zero))

    def without_padding(self, full: jax.Array) -> jax.Array:
        """Returns the exact part of a gathered array."""
        exact = self._gathered_exact()
        return full if exact is None else shortened(full, *exact)

    def with_padding(self, full: jax.Array) -> jax.Array:
        """Returns a full array padded with zeros, to be sharded."""
        if (exact := self._gathered_exact()) is None:
            return full
        dim, size = exact
        return lengthened(full, dim, size + -size % (self.shards() * self.parts))

    def _gathered_exact(self) -> tuple[int, int] | None:
        """Returns ``exact``, or None if a layer gets a part of that dimension."""
        split = () if self.whole else (dim for dim, _ in self.splits)
        return None if self.exact is None or self.exact[0] in split else self.exact

    def decoded(self, full: jax.Array) -> jax.Array:
        """Returns what the layer reads: a gathered array, its 4 bits as values."""
        if self.four_bit is None:
            return full
        # Without a gradient for the tables of codes, which would take the weight's.
        values = jax.lax.stop_gradient(self.four_bit.decode(full))
        return values.astype(self.decoded_to)

    def fetched(self, shard: jax.Array) -> jax.Array:
        """Returns the shard in device memory, copying it from the host if hosted."""
        return jax.device_put(shard, jax.memory.Space.Device) if self.hosted else shard
