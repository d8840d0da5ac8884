"""What RegNets and ResNets have in common.

Shape suffixes: B batch, H height, W width, C channels.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch normalisation."""

    def __init__(
        self,
        config: Any,
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
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        # In a step its statistics are those of the whole batch, over all devices.
        self.normalization = nnx.BatchNorm(
            size_out,
            momentum=0.9,
            epsilon=1e-5,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the normalised output."""
        return self.normalization(self.convolution(x_BHWC))


def make_shortcut(
    config: Any, size_in: int, size: int, stride: int, rngs: nnx.Rngs
) -> ConvNorm | None:
    """Makes what takes the stream past a block that changes its shape, if it does."""
    if size_in == size and stride == 1:
        return None
    return ConvNorm(config, size_in, size, 1, stride=stride, rngs=rngs)


class Stage(nnx.Module):
    """A block that widens the stream and may halve height and width; equal blocks.

    Args:
      make_block: ``make_block(size_in, stride, rngs)`` makes a block.
      size_in: channels of the stage's input.
      size: channels of its output.
      depth: number of blocks.
      stride: of the first block.
      rngs: random streams.
    """

    def __init__(
        self,
        make_block: Callable[[int, int, nnx.Rngs], nnx.Module],
        size_in: int,
        size: int,
        depth: int,
        stride: int,
        *,
        rngs: nnx.Rngs,
    ):
        self.first = jshard.Unit(make_block(size_in, stride, rngs))
        equal = lambda rngs: make_block(size, 1, rngs)
        self.rest = jshard.Stack(equal, depth - 1, rngs=rngs) if depth > 1 else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Returns the stream after this stage."""
        x_BHWC = self.first(x_BHWC)
        return x_BHWC if self.rest is None else self.rest(x_BHWC)


def classifier(config: Any, size: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Makes the last layer, from the mean over height and width to logits."""
    return jshard.Unit(
        nnx.Linear(
            size,
            config.classes,
            kernel_init=nnx.initializers.normal(0.01),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
    )


def make_stages(
    config: Any,
    make_block: Callable[[int, int, int, nnx.Rngs], nnx.Module],
    rngs: nnx.Rngs,
) -> nnx.List:
    """Makes the stages of a network.

    Args:
      config: has ``stem``, ``depths``, ``widths`` and ``downsample_first``.
      make_block: ``make_block(size_in, size, stride, rngs)`` makes a block.
      rngs: random streams.
    """
    stages, size_in = [], config.stem
    for depth, size in zip(config.depths, config.widths, strict=True):
        make = lambda size_in, stride, rngs, size=size: make_block(
            size_in, size, stride, rngs
        )
        stride = 2 if stages or config.downsample_first else 1
        stages.append(Stage(make, size_in, size, depth, stride, rngs=rngs))
        size_in = size
    return nnx.List(stages)


def mean_logits(head: nnx.Linear, x_BHWC: jax.Array) -> jax.Array:
    """Returns the logits, (B, classes), of the mean over height and width."""
    return head(jnp.mean(x_BHWC, axis=(1, 2)))


def check_stages(depths: tuple[int, ...], widths: tuple[int, ...]) -> None:
    """Raises a UserError unless every stage has blocks and channels."""
    if not depths or len(depths) != len(widths) or min(*depths, *widths) < 1:
        raise jshard.UserError(
            f"model: depths={depths} and widths={widths} must give the number of "
            "blocks and of channels of each stage"
        )


def check_channels(images_BHWC: jax.Array, channels: int) -> None:
    """Raises a UserError if images have another number of channels."""
    if images_BHWC.ndim != 4 or images_BHWC.shape[-1] != channels:
        raise jshard.UserError(
            f"images have the shape {list(images_BHWC.shape)}; model.channels="
            f"{channels} means [batch, height, width, {channels}]"
        )
