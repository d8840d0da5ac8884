"""Convolutional networks of stages of residual blocks, as RegNets and ResNets are.

Shape suffixes: B batch, H height, W width, C channels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard
from jshard.models.layers import check, linear, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Sizes of a convolutional network of stages.

    Attributes:
      channels: of the images, 3 for colour.
      classes: number of labels.
      stem: channels of the first convolution.
      depths: blocks of each stage.
      widths: channels of each stage's output.
      downsample_first: whether the first stage halves height and width, too.
      dtype: of the computation, None for that of the parameters or what a policy
        says; batch statistics are float32 or wider.
      param_dtype: of the parameters.
    """

    channels: int = 3
    classes: int = 1000
    stem: int
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    downsample_first: bool
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        depths, widths = self.depths, self.widths
        check(
            bool(depths) and len(depths) == len(widths) and min(*depths, *widths) > 0,
            f"depths={depths} and widths={widths} must give the number of blocks and "
            "of channels of each stage",
        )


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch normalisation."""

    def __init__(
        self,
        config: ConvNetConfig,
        size_in: int,
        size_out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        rngs: nnx.Rngs,
    ):
        self.convolution = nnx.Conv(
            size_in,
            size_out,
            (kernel, kernel),
            strides=stride,
            padding=kernel // 2,
            feature_group_count=groups,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            **options(config, rngs),
        )
        # In a step its statistics are those of the whole batch, over all devices.
        self.normalization = nnx.BatchNorm(
            size_out, momentum=0.9, epsilon=1e-5, **options(config, rngs)
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the normalised output."""
        return self.normalization(self.convolution(x_BHWC))


class ResidualBlock(nnx.Module):
    """Adds a branch of convolutions to the stream.

    Attributes:
      shortcut: what takes the stream past a branch that changes its shape.
    """

    shortcut: ConvNorm | None

    def branch(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns what is added to the stream."""
        raise NotImplementedError

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the stream after this block."""
        y_BHWC = self.branch(x_BHWC)
        kept_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        return nnx.relu(kept_BHWC + y_BHWC)


def make_shortcut(
    config: ConvNetConfig, size_in: int, size: int, stride: int, rngs: nnx.Rngs
) -> ConvNorm | None:
    """Makes a block's shortcut, if it needs one."""
    if size_in == size and stride == 1:
        return None
    return ConvNorm(config, size_in, size, 1, stride=stride, rngs=rngs)


class Stage(nnx.Module):
    """A block that widens the stream and may halve height and width; equal blocks.

    The first block is the one with the stride. ``make_block(size_in, size, stride,
    rngs)`` makes a block.
    """

    def __init__(
        self,
        make_block: Callable[[int, int, int, nnx.Rngs], nnx.Module],
        size_in: int,
        size: int,
        depth: int,
        stride: int,
        *,
        rngs: nnx.Rngs,
    ):
        self.first = jshard.Unit(make_block(size_in, size, stride, rngs))
        equal = lambda rngs: make_block(size, size, 1, rngs)
        self.rest = jshard.Stack(equal, depth - 1, rngs=rngs) if depth > 1 else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the stream after this stage."""
        x_BHWC = self.first(x_BHWC)
        return x_BHWC if self.rest is None else self.rest(x_BHWC)


class ConvNet(nnx.Module):
    """Images, (B, H, W, C), to logits, (B, classes).

    A convolution, stages of blocks, and a linear layer of the mean over height and
    width.

    ``make_block(config, size_in, size, stride, rngs)`` makes a block. ``kernel`` and
    ``stride`` are those of the first convolution, whose output is pooled to half its
    height and width if ``pool`` says so.
    """

    def __init__(
        self,
        config: ConvNetConfig,
        make_block: Callable[..., nnx.Module],
        *,
        kernel: int,
        stride: int,
        pool: bool,
        rngs: nnx.Rngs,
    ):
        self.config, self.pool = config, pool
        self.stem = ConvNorm(
            config, config.channels, config.stem, kernel, stride=stride, rngs=rngs
        )
        stages, size_in = [], config.stem
        make = functools.partial(make_block, config)
        for depth, size in zip(config.depths, config.widths, strict=True):
            by = 2 if stages or config.downsample_first else 1
            stages.append(Stage(make, size_in, size, depth, by, rngs=rngs))
            size_in = size
        self.stages = nnx.List(stages)
        self.classifier = jshard.Unit(
            linear(config, size_in, config.classes, rngs, 0.01)
        )

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Returns logits, (B, classes)."""
        check_channels(images_BHWC, self.config.channels)
        x_BHWC = nnx.relu(self.stem(images_BHWC))
        if self.pool:
            around: Any = ((1, 1), (1, 1))  # Flax's annotation says str
            x_BHWC = nnx.max_pool(x_BHWC, (3, 3), (2, 2), padding=around)
        for stage in self.stages:
            x_BHWC = stage(x_BHWC)
        return self.classifier(jnp.mean(x_BHWC, axis=(1, 2)))


def check_channels(images_BHWC: jax.Array, channels: int) -> None:
    """Raises a UserError if images have another number of channels."""
    if images_BHWC.ndim != 4 or images_BHWC.shape[-1] != channels:
        raise jshard.UserError(
            f"images have the shape {list(images_BHWC.shape)}; model.channels="
            f"{channels} means [batch, height, width, {channels}]"
        )
