"""Rotary positions, and the scalings that make trained models read longer texts.

Shape suffixes: B batch, T time, N heads, H head width, I pairs of its dimensions (H/2).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jshard

SCALINGS = ("none", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """How fast each pair of dimensions turns.

    Attributes:
      theta: base of the wavelengths.
      scaling: "none"; "linear", positions over ``factor`` (Chen et al. 2023,
        arXiv:2306.15595, section 2.3); "llama3" (github.com/meta-llama/llama-models,
        models/llama3/model.py, apply_scaling); "yarn" (Peng et al. 2023,
        arXiv:2309.00071, sections 3.2 and 3.4). The last two slow long wavelengths
        alone.
      factor: by how much the slowed pairs turn less.
      low: pairs that turn fewer times than this in ``length`` are slowed by ``factor``.
      high: pairs that turn more often are not slowed; between the two it is gradual.
      length: the context that the model was trained for before.
      attention_factor: of queries and keys with "yarn"; 0 is what the paper says.
      mscale: of ``temperature``.
      truncate: whether "yarn" is gradual between whole numbers of pairs.
    """

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192
    attention_factor: float = 0.0
    truncate: bool = True
    mscale: float = 0.0

    def frequencies(self, H: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns radians per position of each pair, (I,)."""
        frequency_I = self.theta ** -(jnp.arange(0, H, 2, dtype=dtype) / H)
        if self.scaling == "none":
            return frequency_I
        if self.scaling == "linear":
            return frequency_I / self.factor
        if self.scaling == "llama3":
            turns_I = self.length * frequency_I / (2 * math.pi)
            kept_I = (turns_I - self.low) / (self.high - self.low)
        else:
            # The authors' code is gradual in the number of the pair, not in its turns.
            first, last = self._pair(self.high, H), self._pair(self.low, H)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, H - 1)
            # As theirs, also where last is before first.
            slowed_I = (jnp.arange(H // 2) - first) / (last - first or 1e-3)
            kept_I = 1 - slowed_I
        kept_I = jnp.clip(kept_I, 0, 1).astype(dtype)
        return frequency_I * (kept_I + (1 - kept_I) / self.factor)

    def amplitude(self) -> float:
        """Returns the factor of queries and keys, YaRN's temperature (section 3.4)."""
        if self.scaling != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1

    def temperature(self) -> float:
        """Returns a factor of queries and of keys, rotated or not (DeepSeek-V3)."""
        if self.scaling != "yarn" or self.factor <= 1:
            return 1.0
        return 0.1 * self.mscale * math.log(self.factor) + 1

    def _pair(self, turns: float, H: int) -> float:
        """Returns which pair turns so many times in the context, as a real number."""
        turns_of_first = self.length / (2 * math.pi)
        return H * math.log(turns_of_first / turns) / (2 * math.log(self.theta))


def rotate_by(
    x_BTNH: jax.Array,
    frequency_I: jax.Array,
    positions_BT: jax.Array | None = None,
    amplitude: float | jax.Array = 1.0,
) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

    Rotates each pair of dimensions (i, i + H/2), the layout of Hugging Face's
    checkpoints, by ``position * frequency``.

    Args:
      x_BTNH: queries or keys; H is even.
      frequency_I: of each pair (``Rope.frequencies``), in the dtype of angles and
        products, float32 or wider.
      positions_BT: integers; by default 0 to T-1 in each row. Those of packed documents
        begin again with each.
      amplitude: what the result is multiplied with.

    Returns:
      The same shape and dtype.
    """
    T, dtype = x_BTNH.shape[1], frequency_I.dtype
    if positions_BT is None:
        angles = jshard.nn.positions(T, dtype)[:, None] * frequency_I  # (T, I)
    else:
        angles = positions_BT.astype(dtype)[..., None] * frequency_I  # (B, T, I)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if not isinstance(amplitude, float) or amplitude != 1:
        cos, sin = amplitude * cos, amplitude * sin
    a_BTNI, b_BTNI = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
    turned = (a_BTNI * cos - b_BTNI * sin, b_BTNI * cos + a_BTNI * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def rotate_some(
    x_BTNH: jax.Array,
    frequency_I: jax.Array,
    positions_BT: jax.Array | None = None,
    amplitude: float | jax.Array = 1.0,
) -> jax.Array:
    """Rotates the first dimensions of each head, as many as there are pairs for."""
    width = 2 * len(frequency_I)
    turned = rotate_by(x_BTNH[..., :width], frequency_I, positions_BT, amplitude)
    if width == x_BTNH.shape[-1]:
        return turned
    return jnp.concatenate([turned, x_BTNH[..., width:]], axis=-1)
