"""Weights in float8 as DeepSeek-V3's and Qwen 3's files keep them, decoded when read.

Beside ``NAME.weight`` in e4m3, (outputs, inputs), is ``NAME.weight_scale_inv``: a
number for each block of 128 x 128, those at the ends smaller, which the block is
multiplied with (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

Shape suffixes: P outputs, I inputs.
"""

from collections.abc import Sequence

import numpy as np

BLOCK = 128
SCALE = "_scale_inv"  # what its name has beside the weight's


def is_scaled(weight: Sequence[int], scales: Sequence[int]) -> bool:
    """Returns whether these are the shapes of a weight and of its scales."""
    blocks = tuple(-(-size // BLOCK) for size in weight)
    return len(weight) == 2 and tuple(scales) == blocks


class Decoded:
    """A matrix (P, I), or (I, P), of which slices are decoded to float32.

    Args:
      codes_PI: float8.
      scales: of its blocks.
      transposed: Whether inputs come first.
    """

    def __init__(
        self, codes_PI: np.ndarray, scales: np.ndarray, transposed: bool = False
    ):
        self._codes, self._scales, self._transposed = codes_PI, scales, transposed
        self.shape, self.ndim = codes_PI.shape[:: -1 if transposed else 1], 2

    def transpose(self, axes: Sequence[int]) -> "Decoded":
        """Returns this with its dimensions in another order."""
        swapped = self._transposed != (list(axes) == [1, 0])
        return Decoded(self._codes, self._scales, swapped)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = index[:: -1 if self._transposed else 1]
        block_P, block_I = (
            np.arange(size)[part] // BLOCK
            for size, part in zip(self._codes.shape, (rows, columns), strict=True)
        )
        values_PI = self._codes[rows, columns].astype(np.float32)
        for value_I, block in zip(values_PI, block_P, strict=True):
            value_I *= self._scales[block, block_I].astype(np.float32)
        return values_PI.T if self._transposed else values_PI
