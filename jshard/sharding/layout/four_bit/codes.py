"""Weights in 4 bits: bitsandbytes' nf4 and fp4, with and without double quantization.

QLoRA (Dettmers et al. 2023, arXiv:2305.14314, section 3): every block of 64 values has
a scale, its largest magnitude, and each value is one of 16 codes times that. The scales
have one byte each: less their mean, they are codes of a table of 256 times the largest
magnitude of 256 of them (Dettmers et al. 2021, arXiv:2110.02861, section 2.1). A value
takes 4.127 bits in all. Scales that are not quantized are float32: 4.5 bits.

The numbers are those of bitsandbytes on CPUs. The bytes are one array, so that a weight
has one shard, one gather and one name:

    codes (n / 2,)  scales (n / 64,)  float32 (n / 16384 rounded up,)  mean, float32
    codes (n / 2,)  scales, float32 (n / 64,)                          of "_single"

The values are in the order of PyTorch's matrices (outputs, inputs), so that blocks are
along the inputs; the first of a byte has its upper half.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK, GROUP = 64, 256  # values that share a scale, and scales that do
SINGLE = "_single"  # ends the names of kinds without double quantization

_NF4 = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
-0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
"""
_FP4 = "0 0.0625 8 12 4 6 2 3 0 -0.0625 -8 -12 -4 -6 -2 -3"
_TABLES = {
    "nf4": np.array(_NF4.split(), np.float32),
    "fp4": np.array(_FP4.split(), np.float32) / np.float32(12),
}
CODES = _TABLES | {kind + SINGLE: table for kind, table in _TABLES.items()}


@dataclasses.dataclass(frozen=True)
class FourBit:
    """How a weight is kept in 4 bits.

    Attributes:
      kind: "nf4", "fp4", "nf4_single" or "fp4_single".
      shape: of the weight, of one layer.
      dtype: the name of the weight's dtype, to which decoded values are rounded.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def parts(self) -> tuple[int, ...]:
        """The bytes of the codes, the scales, the scales of these, and their mean."""
        size = math.prod(self.shape)
        if not self.is_double:
            return size // 2, 4 * size // BLOCK
        groups = -(-size // (BLOCK * GROUP))
        return size // 2, size // BLOCK, 4 * groups, 4

    @property
    def is_double(self) -> bool:
        """Whether the scales are quantized, too."""
        return not self.kind.endswith(SINGLE)

    def encode(self, weight: Any) -> jax.Array:
        """Returns the bytes (sum of ``parts``,) of a weight, rounded to ``dtype``."""
        blocks = jnp.swapaxes(weight.astype(self.dtype), -1, -2).astype(jnp.float32)
        blocks = blocks.reshape(-1, BLOCK)
        largest = jnp.max(jnp.abs(blocks), axis=1)
        smallest = jnp.finfo(jnp.float32).tiny  # zeros stay zeros
        scaled = blocks * (1 / jnp.maximum(largest, smallest))[:, None]
        order = np.argsort(CODES[self.kind], kind="stable")
        below = _count_below(scaled, _halfway(CODES[self.kind][order]))
        codes = jnp.asarray(order, jnp.uint8)[below].reshape(-1, 2)
        codes = codes[:, 0] << 4 | codes[:, 1]
        if not self.is_double:
            return jnp.concatenate([codes, _bytes(largest)])
        # XLA multiplies by the reciprocal of a constant.
        count = lax.optimization_barrier(jnp.float32(largest.size))
        mean = _sum_in_pairs(largest) / count
        scales, of_scales = _encode_scales(largest - mean)
        bits = [_bytes(of_scales), _bytes(mean[None])]
        return jnp.concatenate([codes, scales, *bits])

    def decode(self, data: jax.Array) -> jax.Array:
        """Returns the weight of these bytes, of ``shape`` and ``dtype``."""
        ends = np.cumsum(self.parts)[:-1].tolist()
        codes, scales, *rest = jnp.split(data, ends)
        if self.is_double:
            of_scales, mean = map(_floats, rest)
            largest = _decode_scales(scales, of_scales) + mean
        else:
            largest = _floats(scales)
        codes = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1, BLOCK)
        blocks = _take(CODES[self.kind], codes) * largest[:, None]
        *outer, rows, columns = self.shape
        matrix = blocks.astype(self.dtype).reshape(*outer, columns, rows)
        return jnp.swapaxes(matrix, -1, -2)


def _halfway(table: np.ndarray) -> np.ndarray:
    return (table[:-1] + table[1:]) / 2


def _count_below(x: jax.Array, bounds: np.ndarray) -> jax.Array:
    count = jnp.zeros(x.shape, jnp.uint8)
    for bound in bounds:  # fused, where a search would be a loop
        count += x > bound
    return count


def _sum_in_pairs(x: jax.Array) -> jax.Array:
    """Returns a sum in one order, where XLA chooses that of ``jnp.sum`` anew."""
    x = jnp.pad(x, (0, 2 ** (x.size - 1).bit_length() - x.size))
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    return x[0]


def _encode_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes (n,), and the largest magnitude of each 256 scales.

    bitsandbytes rounds to 16 bits before it looks for the nearest code.
    """
    groups = jnp.pad(scales, (0, -scales.size % GROUP)).reshape(-1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=1)
    scaled = groups * (1 / jnp.where(largest == 0, 1, largest))[:, None]
    last = 2**16 - 1
    steps = ((jnp.clip(scaled, -1, 1) + 1) * 0.5 * last + 0.5).astype(jnp.int32)
    values = np.float32(2) * np.arange(last + 1, dtype=np.float32) / np.float32(last)
    first = np.searchsorted(values - np.float32(1), _halfway(scale_table()), "right")
    codes = jnp.searchsorted(jnp.asarray(first), steps, side="right")
    codes = jnp.where(largest[:, None] == 0, 0, codes).astype(jnp.uint8)
    return codes.reshape(-1)[: scales.size], largest


def _decode_scales(codes: jax.Array, largest: jax.Array) -> jax.Array:
    groups = jnp.pad(codes, (0, -codes.size % GROUP)).reshape(-1, GROUP)
    scales = (_take(scale_table(), groups) * largest[:, None]).reshape(-1)[: codes.size]
    # Keeps XLA from adding the mean in the same rounding; a barrier does not.
    return jnp.where(scales == 0, 0, scales)


@functools.cache
def scale_table() -> np.ndarray:
    """Returns the 256 codes of scales, float32 in ascending order.

    Between each power of ten and the next are twice as many as below it, evenly, of
    both signs.
    """
    found: list[Any] = [0, 1]
    for i in range(7):
        count = 2**i
        # Rounded once, as PyTorch's linspace is.
        first, last = float(np.float32(0.1)), 1.0
        step = float((np.float32(last) - np.float32(first)) / np.float32(count))
        k = np.arange(count + 1)
        upper = last - step * (count - k)
        ends = np.where(k < (count + 1) // 2, first + step * k, upper)
        ends = ends.astype(np.float32)
        middles = np.float32(10.0 ** (i - 6)) * ((ends[:-1] + ends[1:]) / 2)
        found += [*middles, *-middles]
    return np.sort(np.array(found, np.float32))


def _take(table: np.ndarray, codes: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[codes].get(mode="promise_in_bounds")


def _bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _floats(data: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(data.reshape(-1, 4), jnp.float32)
