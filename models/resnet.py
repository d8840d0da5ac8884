"""ResNet: residual networks of basic or bottleneck blocks in four stages.

He et al. 2016, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385); as in
later use, a bottleneck halves height and width in its 3 x 3 convolution.

Shape suffixes: B batch, H height, W width, C channels.
"""

import dataclasses

import jax
from flax import nnx

from jshard.models.convolutions import (
    ConvNet,
    ConvNetConfig,
    ConvNorm,
    ResidualBlock,
    make_shortcut,
)
from jshard.models.layers import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ConvNetConfig):
    """Sizes of a ResNet; the defaults are those of ResNet-50.

    Attributes, besides those of ``ConvNetConfig``:
      bottleneck: whether blocks are 1 x 1, 3 x 3, 1 x 1 with a quarter of the channels
        inside, or 3 x 3 twice.
    """

    stem: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    bottleneck: bool = True
    downsample_first: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(
            not self.bottleneck or all(width % 4 == 0 for width in self.widths),
            f"widths={self.widths} must be divisible by 4 with bottlenecks",
        )


class Block(ResidualBlock):
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

    def branch(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns what is added to the stream."""
        *layers, last = self.layers
        for layer in layers:
            x_BHWC = nnx.relu(layer(x_BHWC))
        return last(x_BHWC)


class ResNet(ConvNet):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        super().__init__(config, Block, kernel=7, stride=2, pool=True, rngs=rngs)
