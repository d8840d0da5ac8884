"""The placement of one parameter: its sharding, its memory and its collectives."""

import dataclasses
from typing import Any, Literal

import jax

from jshard.sharding.layout.four_bit.codes import FourBit
from jshard.sharding.layout.padding import lengthened, shortened
from jshard.sharding.settings.mesh import TENSOR, names_of, shard_axes
from jshard.sharding.settings.precision import is_quantized

# Bytes that take a network port no longer than a collective takes to begin.
_SMALL = 2**20


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a parameter is sharded where it is stored.

    Attributes:
      dim: the sharded dimension, counted from the end (-1 is the last), so that it is
        the same for one layer and for a stack of layers; None if replicated.
      over: the mesh axes that shard ``dim``; None for all that shard parameters.
      parts: the number of parts of each shard in a state: a stage's devices have shards
        that are split further over "pipe".
      exact: the padded dimension, counted from the end, and its size without the
        padding; None if there is none. A device's part of what ``Part.splits`` split
        along this dimension has the padding.
      hosted: whether shards are in host memory (``memory_kinds.typed_as_device``).
    """

    dim: int | None
    over: tuple[str, ...] | None = None
    parts: int = 1
    exact: tuple[int, int] | None = None
    hosted: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """What a device's layer gets of a parameter; by default all of it.

    Attributes:
      splits: (dimension, axis) for each mesh axis that splits the parameter for
        computing; the layer gets the device's part of it.
      whole: whether the layer gets the full parameter in spite of ``splits``.
      on_rank_zero: an axis on whose first device alone the layer gets the parameter,
        and zeros elsewhere: a bias that is added to partial sums.
    """

    splits: tuple[tuple[int, str], ...] = ()
    whole: bool = False
    on_rank_zero: str | None = None


@dataclasses.dataclass(frozen=True)
class Weight:
    """The dtypes of a gathered weight.

    Attributes:
      gather: that of the all-gather; None for the parameter's dtype.
      compute: that passed to the layer; None for the parameter's dtype.
      four_bit: how the parameter is kept in 4 bits; None if it is not.
      decoded_to: the dtype that it has in the layer then.
      float8: what products with it may be in (``Precision.products``); None otherwise.
      summed: the dimensions that these sum over, counted from the end.
      packed: the dimension along which bytes of four-bit values have two each, counted
        from the end; None if it is not gathered in these.
    """

    gather: Any = None
    compute: Any = None
    four_bit: FourBit | None = None
    decoded_to: Any = None
    float8: str | None = None
    summed: tuple[int, ...] = ()
    packed: int | None = None


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Whether a parameter has a gradient, and how that is summed over devices.

    Attributes:
      trainable: whether it is computed and reduce-scattered.
      reduce: the dtype of the reduce-scatter; None for the gradient's dtype.
      sum: the dtype of all sums over devices; None for the communicated dtype.
      sum_over: the axes over which devices have different gradients of the same shard.
      sum_at: when these are summed: after each backward of the unit, or once at the
        end of the step.
      only: whether the parameter is not gathered, and zeros take the gradient of a
        weight that is made otherwise (``jshard.sharding.collectives.in_float8``).
    """

    trainable: bool = True
    reduce: Any = None
    sum: Any = None
    sum_over: tuple[str, ...] = ()
    sum_at: Literal["unit", "step"] = "step"
    only: bool = False


@dataclasses.dataclass(frozen=True)
class Placement:
    """The sharding, memory and collectives of one parameter.

    Inside a step a value belongs to one device, and so does the gradient of a gathered
    weight: a parameter's gradient is the sum of the devices' gradients. A
    reduce-scatter sums over the axes that shard ``sharding.dim``, and an all-reduce
    over ``gradient.sum_over``.
    """

    sharding: Sharding
    part: Part = Part()
    weight: Weight = Weight()
    gradient: Gradient = Gradient()

    def axes(self) -> str | tuple[str, ...]:
        """Returns the axes of the gathers and scatters along the sharded dimension."""
        if self.sharding.over is None:
            return shard_axes()
        first, *others = self.sharding.over
        return self.sharding.over if others else first

    def axes_in_turn(self, nbytes: int) -> list[str | tuple[str, ...]]:
        """Returns the axes of scatters of so many bytes; gathers reverse them.

        "tensor" shards what it does not split, such as scales of norms, over more axes
        than the rest. Small ones are sent along the others with the rest, in one
        collective, and along "tensor", within a host, on their own.
        """
        *others, last = names_of(self.axes())
        whole = nbytes > _SMALL or is_quantized(self.weight.gather)
        if whole or last != TENSOR or jax.lax.axis_size(tuple(others)) == 1:
            return [self.axes()]
        return [tuple(others) if len(others) > 1 else others[0], last]

    def shards(self) -> int:
        """Returns the number of shards, inside ``shard_map``."""
        return 1 if self.sharding.dim is None else jax.lax.axis_size(self.axes())

    def differs_over(self) -> tuple[str, ...]:
        """Returns the axes over which devices have different parts of the parameter."""
        over = names_of(self.axes()) if self.sharding.dim is not None else ()
        apart = (axis for _, axis in self.part.splits)
        return (*over, *apart, *names_of(self.part.on_rank_zero))

    def without_padding(self, full: jax.Array) -> jax.Array:
        """Returns the exact part of a gathered array."""
        exact = self._gathered_exact()
        return full if exact is None else shortened(full, *exact)

    def with_padding(self, full: jax.Array) -> jax.Array:
        """Returns a full array padded with zeros, to be sharded."""
        if (exact := self._gathered_exact()) is None:
            return full
        (dim, size), parts = exact, self.shards() * self.sharding.parts
        return lengthened(full, dim, size + -size % parts)

    def _gathered_exact(self) -> tuple[int, int] | None:
        """Returns ``exact``, or None if a layer gets a part of that dimension."""
        exact = self.sharding.exact
        split = () if self.part.whole else (dim for dim, _ in self.part.splits)
        return None if exact is None or exact[0] in split else exact

    def decoded(self, full: jax.Array) -> jax.Array:
        """Returns what the layer reads: a gathered array, its 4 bits as values."""
        if self.weight.four_bit is None:
            return full
        # Without a gradient for the tables of codes, which would take the weight's.
        values = jax.lax.stop_gradient(self.weight.four_bit.decode(full))
        return values.astype(self.weight.decoded_to)

    def fetched(self, shard: jax.Array) -> jax.Array:
        """Returns the shard in device memory, copying it from the host if hosted."""
        if not self.sharding.hosted:
            return shard
        return jax.device_put(shard, jax.memory.Space.Device)
