"""RegNet: convolutional networks of equal blocks in four stages.

Radosavovic et al. 2020, "Designing Network Design Spaces" (arXiv:2003.13678): RegNetX,
and RegNetY with squeeze and excitation.

Shape suffixes: B batch, H height, W width, C channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.models.convolutions import (
    ConvNet,
    ConvNetConfig,
    ConvNorm,
    ResidualBlock,
    make_shortcut,
)
from jshard.models.layers import check, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegNetConfig(ConvNetConfig):
    """Sizes of a RegNet; the defaults are those of RegNetY-16GF.

    Attributes, besides those of ``ConvNetConfig``:
      stem_stride: 2, or 1 for small images.
      group_width: channels of a group of the 3 x 3 convolutions.
      squeeze_excite: whether it is a RegNetY.
    """

    stem: int = 32
    stem_stride: int = 2
    depths: tuple[int, ...] = (2, 4, 11, 1)
    widths: tuple[int, ...] = (224, 448, 1232, 3024)
    group_width: int = 112
    squeeze_excite: bool = True
    downsample_first: bool = True

    def __post_init__(self):
        super().__post_init__()
        for width in self.widths:
            check(
                width % self.groups(width) == 0,
                f"widths={self.widths}: {width} is not divisible by "
                f"{self.groups(width)} groups (group_width={self.group_width})",
            )

    def groups(self, width: int) -> int:
        """Returns the number of groups of a 3 x 3 convolution."""
        return max(1, width // self.group_width)


class SqueezeExcite(nnx.Module):
    """Scales channels by what their means say (Hu et al. 2018, arXiv:1709.01507)."""

    def __init__(
        self, config: RegNetConfig, size: int, reduced: int, *, rngs: nnx.Rngs
    ):
        self.reduce = nnx.Conv(size, reduced, (1, 1), **options(config, rngs))
        self.expand = nnx.Conv(reduced, size, (1, 1), **options(config, rngs))

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the scaled input."""
        mean_B11C = jnp.mean(x_BHWC, axis=(1, 2), keepdims=True)
        return x_BHWC * nnx.sigmoid(self.expand(nnx.relu(self.reduce(mean_B11C))))


class Block(ResidualBlock):
    """Convolutions of 1 x 1, 3 x 3 in groups and 1 x 1 on a residual branch."""

    def __init__(
        self,
        config: RegNetConfig,
        size_in: int,
        size: int,
        stride: int,
        rngs: nnx.Rngs,
    ):
        groups, reduced = config.groups(size), max(1, round(size_in / 4))
        self.conv1 = ConvNorm(config, size_in, size, 1, rngs=rngs)
        self.conv2 = ConvNorm(
            config, size, size, 3, stride=stride, groups=groups, rngs=rngs
        )
        self.squeeze_excite = (
            SqueezeExcite(config, size, reduced, rngs=rngs)
            if config.squeeze_excite
            else None
        )
        self.conv3 = ConvNorm(config, size, size, 1, rngs=rngs)
        self.shortcut = make_shortcut(config, size_in, size, stride, rngs)

    def branch(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns what is added to the stream."""
        y_BHWC = nnx.relu(self.conv2(nnx.relu(self.conv1(x_BHWC))))
        if self.squeeze_excite is not None:
            y_BHWC = self.squeeze_excite(y_BHWC)
        return self.conv3(y_BHWC)


class RegNet(ConvNet):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    def __init__(self, config: RegNetConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config, Block, kernel=3, stride=config.stem_stride, pool=False, rngs=rngs
        )
