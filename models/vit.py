"""A vision transformer on patches of an image.

Dosovitskiy et al. 2021, "An Image Is Worth 16x16 Words" (arXiv:2010.11929).

Shape suffixes: B batch, H height, W width, C channels, T patches and the class token, D
width of the stream, N heads, K width of a head.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jshard
from jshard.models.convolutions import check_channels
from jshard.models.layers import check, check_heads, layer_norm, linear, options


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes of a vision transformer; the defaults are those of ViT-B/16.

    Attributes:
      image_size: height and width of the images.
      patch_size: height and width of a patch.
      channels: of the images, 3 for colour.
      classes: number of labels.
      num_layers: number of blocks.
      num_heads: N.
      width: D; K is D / N.
      hidden_width: of the MLPs.
      qkv_bias: whether queries, keys and values have biases.
      norm_eps: added to variances.
      position_std: deviation of the initial positions, learned ones.
      dropout: rate, on embeddings and on each residual branch.
      attention: "auto", "xla" or "cudnn"; see ``jshard.nn.dot_product_attention``.
      dtype: of the computation; None is that of the parameters, or what a policy says.
      param_dtype: of the parameters.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    hidden_width: int = 3072
    qkv_bias: bool = True
    norm_eps: float = 1e-12
    position_std: float = 0.02
    dropout: float = 0.0
    attention: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check(
            self.image_size % self.patch_size == 0,
            f"image_size={self.image_size} is not divisible by "
            f"patch_size={self.patch_size}",
        )
        check_heads(self)


# The backward computes its derivative from its input again, rather than keep it.
_gelu = jax.checkpoint(functools.partial(jax.nn.gelu, approximate=False))
_linear = functools.partial(linear, init=nnx.initializers.xavier_uniform())


def _norm(config: ViTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # Images have flat regions, of which E[x^2] - E[x]^2 would lose the variance.
    return layer_norm(config, rngs, config.norm_eps, use_fast_variance=False)


class Attention(nnx.Module):
    """Self-attention of all patches."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        width, bias = config.width, config.qkv_bias
        self.num_heads = config.num_heads
        self.implementation = config.attention
        self.query, self.key, self.value = (
            _linear(config, width, width, rngs, bias=bias) for _ in range(3)
        )
        self.out = _linear(config, width, width, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the attention output, (B, T, D)."""
        B, T, _ = x_BTD.shape
        q_BTNK, k_BTNK, v_BTNK = (
            linear(x_BTD).reshape(B, T, self.num_heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        y_BTNK = jshard.nn.dot_product_attention(
            q_BTNK, k_BTNK, v_BTNK, implementation=self.implementation
        )
        return self.out(y_BTNK.reshape(B, T, -1))


class Block(nnx.Module):
    """Attention and MLP, each on a normalised residual branch."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.up = _linear(config, config.width, config.hidden_width, rngs)
        self.down = _linear(config, config.hidden_width, config.width, rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the stream after this block."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        hidden = _gelu(self.up(self.norm2(x_BTD)))
        return x_BTD + self.dropout(self.down(hidden))


class ViT(nnx.Module):
    """Images, (B, H, W, C), to logits, (B, classes)."""

    splits_sequences = (
        "its sequences begin with a class token and are made of whole images; use more "
        "devices of fsdp"
    )

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, patch = config.width, (config.patch_size, config.patch_size)
        self.patches = nnx.Conv(
            config.channels,
            width,
            patch,
            strides=patch,
            padding="VALID",
            **options(config, rngs),
        )
        T = (config.image_size // config.patch_size) ** 2 + 1
        normal = nnx.initializers.truncated_normal(config.position_std)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width), config.param_dtype))
        self.positions = nnx.Param(
            normal(rngs.params(), (1, T, width), config.param_dtype)
        )
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs)
        self.classifier = jshard.Unit(_linear(config, width, config.classes, rngs))

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        """Returns logits, (B, classes)."""
        size = self.config.image_size
        check_channels(images_BHWC, self.config.channels)
        if images_BHWC.shape[1:3] != (size, size):
            raise jshard.UserError(
                f"images have the shape {list(images_BHWC.shape)}; model.image_size="
                f"{size} means [batch, {size}, {size}, channels]"
            )
        x_BHWD = self.patches(images_BHWC)
        B, D = x_BHWD.shape[0], x_BHWD.shape[-1]
        first_11D = self.class_token.get_value().astype(x_BHWD.dtype)
        positions_1TD = self.positions.get_value().astype(x_BHWD.dtype)
        first_B1D = jnp.broadcast_to(first_11D, (B, 1, D))
        x_BTD = jnp.concatenate([first_B1D, x_BHWD.reshape(B, -1, D)], axis=1)
        x_BTD = self.blocks(self.dropout(x_BTD + positions_1TD))
        # The norm is of each position, and only the class token's is read.
        return self.classifier(self.norm(x_BTD[:, 0]))
