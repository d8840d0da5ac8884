"""A GPT-2 class decoder.

Shape suffixes: B batch, T time, D model width, E width of all heads, N heads, H head
width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.inference.generation import continue_prompts as generate  # noqa: F401  # recipes have it
from jshard.inference.generation import kv_cache
from jshard.models.decoder import Decoder, Features
from jshard.models.layers import (
    check_heads,
    embedding,
    layer_norm,
    linear,
    residual_std,
)
from jshard.nn import own_columns


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
      vocab_size: V, number of tokens.
      sequence_length: the longest T, number of learned positions.
      num_layers: number of blocks.
      num_heads: N.
      width: D; H is D / N.
      dropout: rate, on embeddings and on each residual branch.
      tied: whether the head is the transposed embedding.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      label_smoothing: of the targets of the loss, as in ``jshard.nn.cross_entropy``.
      z_loss: likewise.
      attention: "auto", "xla" or "cudnn"; see ``jshard.nn.dot_product_attention``.
      max_segments: the most documents of a packed row, padding included; 0 is unknown.
      dtype: of the computation; None is that of the parameters, or what a policy says.
      param_dtype: of the parameters.
    """

    vocab_size: int = 50257
    sequence_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    dropout: float = 0.0
    tied: bool = True
    loss_chunk: int = 1024
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    attention: str = "auto"
    max_segments: int = 0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_heads(self)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.num_heads = config.num_heads
        self.implementation = config.attention
        self.max_segments = config.max_segments
        self.qkv = linear(config, width, 3 * width, rngs)
        self.out = linear(config, width, width, rngs, residual_std(config))

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the attention output, (B, T, D)."""
        return jshard.nn.tensor_parallel(
            self._mixed, x_BTD, segment_ids_BT, tokens=("segment_ids_BT",)
        )

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The heads."""
        return jshard.nn.Split(rows=("out",), counts={"num_heads": self.num_heads})

    def _mixed(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        q_BTNH, k_BTNH, v_BTNH = self._heads(x_BTD)
        packed = segment_ids_BT is not None and self.max_segments > 0
        y_BTNH = jshard.nn.dot_product_attention(
            q_BTNH,
            k_BTNH,
            v_BTNH,
            is_causal=True,
            segment_ids_BT=segment_ids_BT,
            max_segments=self.max_segments if packed else None,
            implementation=self.implementation,
        )
        return self._merge(y_BTNH)

    def decode(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        cache: kv_cache.KVCache,
        layer: jax.Array,
    ) -> tuple[jax.Array, kv_cache.KVCache]:
        """Returns the attention output, (B, T, D), and the cache with these tokens."""
        q_BTNH, k_BTNH, v_BTNH = self._heads(x_BTD)
        y_BTNH, cache = kv_cache.attend(
            q_BTNH, k_BTNH, v_BTNH, positions_BT, cache, layer
        )
        return self._merge(y_BTNH), cache

    def _heads(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries, keys and values, (B, T, N, H) each."""
        B, T, D = x_BTD.shape
        qkv_BTE = checkpoint_name(own_columns(self.qkv, [D, D, D])(x_BTD), "qkv")
        qkv_BTCNH = qkv_BTE.reshape(B, T, 3, -1, D // self.num_heads)
        return tuple(qkv_BTCNH[:, :, i] for i in range(3))

    def _merge(self, y_BTNH: jax.Array) -> jax.Array:
        y_BTD = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
        return self.out(checkpoint_name(y_BTD, "attended"))


class Block(nnx.Module):
    """Attention and MLP, each on a normalised residual branch."""

    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.norm1 = layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = layer_norm(config, rngs)
        self.up = linear(config, width, 4 * width, rngs)
        self.down = linear(config, 4 * width, width, rngs, residual_std(config))
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        stream: Any,
        segment_ids_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> Any:
        """Returns the stream after this block.

        The stream is the residual stream, (B, T, D). To decode tokens at
        ``positions_BT`` it is (that, cache, number of this layer).
        """
        if positions_BT is None:
            attended = self.attention(self.norm1(stream), segment_ids_BT)
            return self._mlp(stream + self.dropout(attended))
        x_BTD, cache, layer = stream
        attended, cache = self.attention.decode(
            self.norm1(x_BTD), positions_BT, cache, layer
        )
        return self._mlp(x_BTD + attended), cache, layer + 1

    def _mlp(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the residual stream after the MLP."""
        y_BTD = jshard.nn.tensor_parallel(self._products, self.norm2(x_BTD))
        return x_BTD + self.dropout(y_BTD)

    def _products(self, x_BTD: jax.Array) -> jax.Array:
        hidden = checkpoint_name(self.up(x_BTD), "hidden")
        # Its derivative is recomputed: that is cheaper than to store and read it.
        return self.down(jax.checkpoint(jax.nn.gelu)(hidden))


class GPT(Decoder):
    """The decoder, with learned positions."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = jshard.Unit(embedding(config, config.vocab_size, rngs))
        self.positions = embedding(config, config.sequence_length, rngs, 0.01)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = layer_norm(config, rngs)
        if not config.tied:
            self.head = jshard.Unit(
                linear(config, config.width, config.vocab_size, rngs, bias=False)
            )

    def features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: kv_cache.KVCache | None = None,
        weights_BT: jax.Array | None = None,
    ) -> Features:
        """Returns what the head is applied to; with a cache, for ``decode``."""
        del weights_BT  # for routers
        tied = self.config.tied  # then gathered once for both uses
        embed = jshard.gathered(self.embed) if tied else self.embed
        here_BT = jshard.nn.positions(tokens_BT.shape[1])
        if positions_BT is not None:
            here_BT = positions_BT
        if cache is not None:  # with padding, which the table would turn into nan
            here_BT = jnp.clip(here_BT, 0, self.config.sequence_length - 1)
        stream: Any = self.dropout(embed(tokens_BT) + self.positions(here_BT))
        shared = () if segment_ids_BT is None else (segment_ids_BT,)
        if cache is not None:
            stream, shared = (stream, cache, jnp.int32(0)), (None, positions_BT)
        if tied:
            out = self.blocks(stream, *shared)
            head_DV = embed.embedding.get_value().T
        else:
            head, out = jshard.gathered(
                self.head, during=(self.blocks, stream, *shared)
            )
            head_DV = jshard.nn.kernel_of(head)
        x_BTD, cache, _ = (out, None, None) if cache is None else out
        return Features(self.norm(x_BTD), head_DV, cache=cache)

    def init_cache(self, batch: int, length: int) -> kv_cache.KVCache:
        """Returns an empty cache for ``batch`` rows of up to ``length`` tokens."""
        config = self.config
        N, H = config.num_heads, config.width // config.num_heads
        dtype = config.dtype or config.param_dtype
        return kv_cache.KVCache.zeros(config.num_layers, batch, length, N, H, dtype)
