"""Weights in 4 bits as gpt-oss's files keep them: MXFP4, decoded where they are read.

32 numbers next to each other have one scale, a power of two (OCP Microscaling Formats
1.0, section 5). A byte holds two of them, the first in its lower half. What is decoded
is exact in bfloat16.

Shape suffixes: E experts, I inputs, P outputs, G groups of inputs.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

GROUP = 32

_VALUES = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
_VALUES_OF_BYTES = np.stack(
    [_VALUES[np.arange(256) % 16], _VALUES[np.arange(256) // 16]], 1
)


def decoded_shape(
    codes: Sequence[int], scales: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns (E, I, P) of codes (E, P, G, 16) and scales (E, P, G); None of others."""
    if len(codes) != 4 or tuple(codes) != (*scales, GROUP // 2):
        return None
    E, P, G, _ = codes
    return E, G * GROUP, P


class Decoded:
    """Experts' matrices (E, I, P), of which slices are decoded.

    Args:
      codes_EPG: bytes, (E, P, G, 16).
      scales_EPG: bytes, the exponents plus 127.
    """

    def __init__(self, codes_EPG: np.ndarray, scales_EPG: np.ndarray):
        self._codes, self._scales = codes_EPG, scales_EPG
        E, P, G = scales_EPG.shape
        self.shape, self.ndim = (E, G * GROUP, P), 3

    def transpose(self, axes: Sequence[int]) -> "Decoded":
        """Returns this; other orders than its own are not there."""
        assert list(axes) == [0, 1, 2]
        return self

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, inputs, outputs = index
        parts = [
            self._matrix(e, outputs)[inputs] for e in range(self.shape[0])[experts]
        ]
        return np.stack(parts)

    def _matrix(self, expert: int, outputs: slice) -> np.ndarray:
        codes_PG, scales_PG = (x[expert, outputs] for x in (self._codes, self._scales))
        values_PGX = _VALUES_OF_BYTES[codes_PG].reshape(*scales_PG.shape, GROUP)
        scales_PG = scales_PG.view(jnp.float8_e8m0fnu).astype(np.float32)
        values_PI = (values_PGX * scales_PG[..., None]).reshape(len(scales_PG), -1)
        return values_PI.T.astype(jnp.bfloat16)
