"""A GPT-2 class decoder.

Shape suffixes: B batch, T time, D model width, N heads, H head width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard import cross_entropy


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
        B, T, D = x_BTD.shape
        qkv_BTE = checkpoint_name(self.qkv(x_BTD), "qkv")
        qkv_BTCNH = qkv_BTE.reshape(B, T, 3, self.num_heads, -1)
        q_BTNH, k_BTNH, v_BTNH = (qkv_BTCNH[:, :, i] for i in range(3))
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
        y_BTD = checkpoint_name(y_BTNH.reshape(B, T, D), "attended")
        return self.out(y_BTD)


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
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the residual stream after this block, (B, T, D)."""
        attended = self.attention(self.norm1(x_BTD), segment_ids_BT)
        x_BTD = x_BTD + self.dropout(attended)
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
        return jnp.dot(
            x_BTD,
            head_DV.astype(x_BTD.dtype),
            preferred_element_type=jnp.promote_types(x_BTD.dtype, jnp.float32),
        )

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

    def _features_and_head(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        shared = () if segment_ids_BT is None else (segment_ids_BT,)
        if self.config.tied:  # gathered once for both uses
            embed = jshard.gathered(self.embed)
            x_BTD = self.blocks(self._first(embed(tokens_BT), positions_BT), *shared)
            head_DV = embed.embedding.get_value().T
        else:
            x_BTD = self._first(self.embed(tokens_BT), positions_BT)
            head, x_BTD = jshard.gathered_during(self.head, self.blocks, x_BTD, *shared)
            head_DV = head.kernel.get_value()
        return self.norm(x_BTD), head_DV

    def _first(self, x_BTD: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """Returns the input of the first block."""
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])
        return self.dropout(x_BTD + self.positions(positions_BT))


def generate(
    model: GPT, prompt: dict[str, jax.Array], *, length: int, temperature: float = 0.8
) -> jax.Array:
    """Samples ``length`` tokens after each prompt, by full forward passes.

    Args:
      model: in eval mode.
      prompt: ``tokens`` (B, T0) and ``seed`` (B,), one random seed per example.
      length: tokens to sample; T0 + length must not exceed the sequence length.
      temperature: of the softmax.

    Returns:
      Tokens (B, T0 + length).
    """
    start_BT = prompt["tokens"]
    T0 = start_BT.shape[1]
    tokens_BT = jnp.pad(start_BT, [(0, 0), (0, length)])

    def body(i: Any, tokens_BT: jax.Array) -> jax.Array:
        logits_BV = lax.dynamic_index_in_dim(model(tokens_BT), i - 1, 1, keepdims=False)

        def sample(seed: jax.Array, logits_V: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), i)
            return jax.random.categorical(key, logits_V / temperature)

        next_B = jax.vmap(sample)(prompt["seed"], logits_BV)
        return lax.dynamic_update_index_in_dim(
            tokens_BT, next_B.astype(tokens_BT.dtype), i, 1
        )

    return lax.fori_loop(T0, T0 + length, body, tokens_BT)
