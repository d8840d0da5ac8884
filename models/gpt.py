"""A GPT-2 class decoder.

Shape suffixes: B batch, T time, D model width, N heads, H head width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard import cross_entropy
from jshard.generation import continue_prompts as generate  # noqa: F401  # recipes have it
from jshard.nn import kv_cache


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
      attention: "auto", "xla" or "cudnn"; see ``jshard.dot_product_attention``.
      max_segments: the most documents of a packed row, padding included; 0 is unknown.
      dtype: of the computation.
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
    attention: str = "auto"
    max_segments: int = 0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        if self.width % self.num_heads:
            raise jshard.UserError(
                f"model: width={self.width} does not divide by "
                f"num_heads={self.num_heads}"
            )


def _linear(
    config: GPTConfig, size_in: int, size_out: int, rngs: nnx.Rngs, std: float = 0.02
) -> nnx.Linear:
    return nnx.Linear(
        size_in,
        size_out,
        kernel_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=1e-5,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _embed(config: GPTConfig, size: int, rngs: nnx.Rngs, std: float) -> nnx.Embed:
    return nnx.Embed(
        size,
        config.width,
        embedding_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        residual_std = 0.02 / (2 * config.num_layers) ** 0.5  # GPT-2, section 2.3
        self.num_heads = config.num_heads
        self.implementation = config.attention
        self.max_segments = config.max_segments
        self.qkv = _linear(config, width, 3 * width, rngs)
        self.out = _linear(config, width, width, rngs, residual_std)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the attention output, (B, T, D)."""
        q_BTNH, k_BTNH, v_BTNH = self._heads(x_BTD)
        packed = segment_ids_BT is not None and self.max_segments > 0
        y_BTNH = jshard.dot_product_attention(
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
        B, T, _ = x_BTD.shape
        qkv_BTE = checkpoint_name(self.qkv(x_BTD), "qkv")
        qkv_BTCNH = qkv_BTE.reshape(B, T, 3, self.num_heads, -1)
        return tuple(qkv_BTCNH[:, :, i] for i in range(3))

    def _merge(self, y_BTNH: jax.Array) -> jax.Array:
        y_BTD = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
        return self.out(checkpoint_name(y_BTD, "attended"))


class Block(nnx.Module):
    """Attention and MLP, each on a normalised residual branch."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        residual_std = 0.02 / (2 * config.num_layers) ** 0.5
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.up = _linear(config, width, 4 * width, rngs)
        self.down = _linear(config, 4 * width, width, rngs, residual_std)
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
        hidden = checkpoint_name(self.up(self.norm2(x_BTD)), "hidden")
        # Its derivative is recomputed: that is cheaper than to store and read it.
        hidden = jax.checkpoint(jax.nn.gelu)(hidden)
        return x_BTD + self.dropout(self.down(hidden))


class GPT(nnx.Module):
    """Tokens to logits; ``loss`` for training, without the logits of a whole batch."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = jshard.Unit(_embed(config, config.vocab_size, rngs, 0.02))
        self.positions = _embed(config, config.sequence_length, rngs, 0.01)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs)
        if not config.tied:
            self.head = jshard.Unit(
                nnx.Linear(
                    config.width,
                    config.vocab_size,
                    use_bias=False,
                    kernel_init=nnx.initializers.normal(0.02),
                    dtype=config.dtype,
                    param_dtype=config.param_dtype,
                    rngs=rngs,
                )
            )

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider.

        Args:
          tokens_BT: integers.
          positions_BT: of packed documents, each from 0; by default 0 to T-1.
          segment_ids_BT: of packed documents, which attend only to themselves.
        """
        x_BTD, head_DV = self._features_and_head(
            tokens_BT, positions_BT, segment_ids_BT
        )
        return self._logits(x_BTD, head_DV)

    def loss(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jshard.Mean:
        """Returns the cross-entropy in nats, a Mean weighted by ``weights_BT``."""
        x_BTD, head_DV = self._features_and_head(
            tokens_BT, positions_BT, segment_ids_BT
        )
        return cross_entropy(
            x_BTD, head_DV, targets_BT, weights_BT, chunk=self.config.loss_chunk
        )

    def init_cache(self, batch: int, length: int) -> kv_cache.KVCache:
        """Returns an empty cache for ``batch`` rows of up to ``length`` tokens."""
        config = self.config
        N, H = config.num_heads, config.width // config.num_heads
        return kv_cache.KVCache.zeros(
            config.num_layers, batch, length, N, H, config.dtype
        )

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: kv_cache.KVCache
    ) -> tuple[jax.Array, kv_cache.KVCache]:
        """Returns the logits of new tokens, (B, T, V), and the cache with them.

        Args:
          tokens_BT: tokens that follow those in the cache.
          positions_BT: their positions; -1 for padding, which is written nowhere.
          cache: from ``init_cache`` or an earlier call.
        """
        # Outside the embedding is padding, which it would turn into nan.
        embedded_BT = jnp.clip(positions_BT, 0, self.config.sequence_length - 1)

        def stream(x_BTD: jax.Array) -> tuple:
            return self._first(x_BTD, embedded_BT), cache, jnp.int32(0)

        (x_BTD, cache, _), head_DV = self._stack_and_head(
            tokens_BT, stream, None, positions_BT
        )
        return self._logits(self.norm(x_BTD), head_DV), cache

    def _logits(self, x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
        return jnp.dot(
            x_BTD,
            head_DV.astype(x_BTD.dtype),
            preferred_element_type=jnp.promote_types(x_BTD.dtype, jnp.float32),
        )

    def _features_and_head(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        first = functools.partial(self._first, positions_BT=positions_BT)
        shared = () if segment_ids_BT is None else (segment_ids_BT,)
        x_BTD, head_DV = self._stack_and_head(tokens_BT, first, *shared)
        return self.norm(x_BTD), head_DV

    def _stack_and_head(
        self, tokens_BT: jax.Array, first: Callable[[jax.Array], Any], *shared: Any
    ) -> tuple[Any, jax.Array]:
        """Returns what the blocks make of ``first(embedded tokens)``, and the head."""
        if self.config.tied:  # gathered once for both uses
            embed = jshard.gathered(self.embed)
            out = self.blocks(first(embed(tokens_BT)), *shared)
            return out, embed.embedding.get_value().T
        stream = first(self.embed(tokens_BT))
        head, out = jshard.gathered_during(self.head, self.blocks, stream, *shared)
        return out, head.kernel.get_value()

    def _first(self, x_BTD: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """Returns the input of the first block."""
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])
        return self.dropout(x_BTD + self.positions(positions_BT))
