"""RegNet: convolutional networks of equal blocks in four stages.

Radosavovic et al. 2020, "Designing Network Design Spaces" (arXiv:2003.13678): RegNetX,
and RegNetY with squeeze and excitation.

Shape suffixes: B batch, H height, W width, C channels.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard
from jshard.models.convolutions import (
    ConvNorm,
    check_channels,
    check_stages,
    classifier,
    make_shortcut,
    make_stages,
    mean_logits,
)


@dataclasses.dataclass(frozen=True)
class RegNetConfig:
    """Sizes of a RegNet; the defaults are those of RegNetY-16GF.

    Attributes:
      channels: of the images, 3 for colour.
      classes: number of labels.
      stem: channels of the first convolution.
      stem_stride: 2, or 1 for small images.
      depths: blocks of each stage.
      widths: channels of each stage.
      group_width: channels of a group of the 3 x 3 convolutions.
      squeeze_excite: whether it is a RegNetY.
      downsample_first: whether the first stage halves height and width, too.
      dtype: of the computation, None for that of the parameters or what a policy
        says; batch statistics are float32 or wider.
      param_dtype: of the parameters.
    """

    channels: int = 3
    classes: int = 1000
    stem: int = 32
    stem_stride: int = 2
    depths: tuple[int, ...] = (2, 4, 11, 1)
    widths: tuple[int, ...] = (224, 448, 1232, 3024)
    group_width: int = 112
    squeeze_excite: bool = True
    downsample_first: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_stages(self.depths, self.widths)
        for width in self.widths:
            if width % self.groups(width):
                raise jshard.UserError(
                    f"model: widths={self.widths}: {width} does not divide into "
                    f"{self.groups(width)} groups, of group_width={self.group_width}"
                )

    def groups(self, width: int) -> int:
        """Returns the number of groups of a 3 x 3 convolution."""
        return max(1, width // self.group_width)


class SqueezeExcite(nnx.Module):
    """Scales channels by what their means say (Hu et al. 2018, arXiv:1709.01507)."""

    def __init__(
        self, config: RegNetConfig, size: int, reduced: int, *, rngs: nnx.Rngs
    ):
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.reduce = nnx.Conv(size, reduced, (1, 1), rngs=rngs, **types)
        self.expand = nnx.Conv(reduced, size, (1, 1), rngs=rngs, **types)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the scaled input."""
        mean_B11C = jnp.mean(x_BHWC, axis=(1, 2), keepdims=True)
        return x_BHWC * nnx.sigmoid(self.expand(nnx.relu(self.reduce(mean_B11C))))


class Block(nnx.Module):
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

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the stream after this block."""
        y_BHWC = nnx.relu(self.conv2(nnx.relu(self.conv1(x_BHWC))))
        if self.squeeze_excite is not None:
            y_BHWC = self.squeeze_excite(y_BHWC)
        y_BHWC = self.conv3(y_BHWC)
        kept_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return nnx.relu(kept_BHWC + y_BHWC)


class RegNet(nnx.Module):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    def __init__(self, config: RegNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = ConvNorm(
            config,
            config.channels,
            config.stem,
            3,
            stride=config.stem_stride,
            rngs=rngs,
        )
        make_block = lambda *sizes_and_rngs: Block(config, *sizes_and_rngs)
        self.stages = make_stages(config, make_block, rngs)
        self.classifier = classifier(config, config.widths[-1], rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Returns logits, (B, classes)."""
        check_channels(images_BHWC, self.config.channels)
        x_BHWC = nnx.relu(self.stem(images_BHWC))
        for stage in self.stages:
            x_BHWC = stage(x_BHWC)
        return mean_logits(self.classifier, x_BHWC)
