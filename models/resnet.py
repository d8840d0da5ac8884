"""ResNet: residual networks of basic or bottleneck blocks in four stages.

He et al. 2016, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385); as in
later use, a bottleneck halves height and width in its 3 x 3 convolution.

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
class ResNetConfig:
    """Sizes of a ResNet; the defaults are those of ResNet-50.

    Attributes:
      channels: of the images, 3 for colour.
      classes: number of labels.
      stem: channels of the first convolution.
      depths: blocks of each stage.
      widths: channels of each stage's output.
      bottleneck: whether blocks are 1 x 1, 3 x 3, 1 x 1 with a quarter of the channels
        inside, or 3 x 3 twice.
      downsample_first: whether the first stage halves height and width, too.
      dtype: of the computation, None for that of the parameters or what a policy
        says; batch statistics are float32 or wider.
      param_dtype: of the parameters.
    """

    channels: int = 3
    classes: int = 1000
    stem: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    bottleneck: bool = True
    downsample_first: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_stages(self.depths, self.widths)
        if self.bottleneck and any(width % 4 for width in self.widths):
            raise jshard.UserError(
                f"model: widths={self.widths} must divide by 4 in bottlenecks"
            )


class Block(nnx.Module):
    """Two or three convolutions on a residual branch."""

    def __init__(
        self,
        config: ResNetConfig,
        size_in: int,
        size: int,
        stride: int,
        rngs: nnx.Rngs,
    ):
        if config.bottleneck:
            inner = size // 4
            shapes = [(size_in, inner, 1, 1), (inner, inner, 3, stride)]
            shapes += [(inner, size, 1, 1)]
        else:
            shapes = [(size_in, size, 3, stride), (size, size, 3, 1)]
        self.layers = nnx.List(
            [ConvNorm(config, *sizes, stride=by, rngs=rngs) for *sizes, by in shapes]
        )
        self.shortcut = make_shortcut(config, size_in, size, stride, rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the stream after this block."""
        *layers, last = self.layers
        y_BHWC = x_BHWC
        for layer in layers:
            y_BHWC = nnx.relu(layer(y_BHWC))
        kept_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return nnx.relu(kept_BHWC + last(y_BHWC))


class ResNet(nnx.Module):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = ConvNorm(
            config, config.channels, config.stem, 7, stride=2, rngs=rngs
        )
        make_block = lambda *sizes_and_rngs: Block(config, *sizes_and_rngs)
        self.stages = make_stages(config, make_block, rngs)
        self.classifier = classifier(config, config.widths[-1], rngs)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Returns logits, (B, classes)."""
        check_channels(images_BHWC, self.config.channels)
        x_BHWC = nnx.relu(self.stem(images_BHWC))
        around: Any = ((1, 1), (1, 1))  # Flax's annotation says str
        x_BHWC = nnx.max_pool(x_BHWC, (3, 3), (2, 2), padding=around)
        for stage in self.stages:
            x_BHWC = stage(x_BHWC)
        return mean_logits(self.classifier, x_BHWC)
