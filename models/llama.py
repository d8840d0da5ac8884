"""A Llama class decoder (Touvron et al. 2023, arXiv:2307.09288, section 2.2).

Shape suffixes: B batch, T time, D model width, N heads, K key-value heads, H head
width, F hidden width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are those of Llama 2 7B.

    Attributes:
      vocab_size: V, number of tokens.
      sequence_length: T in training; the model itself takes any.
      num_layers: number of blocks.
      num_heads: N, heads of the queries.
      num_kv_heads: K, heads of keys and values; each serves N / K query heads.
      width: D; H is D / N.
      hidden: F, width of the gated MLP.
      rope_theta: base of the rotary wavelengths.
      norm_eps: added to the mean square in RMSNorm.
      tied: whether the head is the transposed embedding.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      attention: "auto", "cudnn", "blockwise" or "xla" of
        ``jshard.dot_product_attention``.
      dtype: of the computation.
      param_dtype: of the parameters.
    """

    vocab_size: int = 32000
    sequence_length: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    width: int = 4096
    hidden: int = 11008
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    loss_chunk: int = 1024
    attention: str = "auto"
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        if self.width % self.num_heads or self.width // self.num_heads % 2:
            raise jshard.UserError(
                f"model: width={self.width} over num_heads={self.num_heads} must be an "
                "even whole number"
            )
        if self.num_heads % self.num_kv_heads:
            raise jshard.UserError(
                f"model: num_heads={self.num_heads} does not divide by "
                f"num_kv_heads={self.num_kv_heads}"
            )


def _linear(
    config: LlamaConfig, size_in: int, size_out: int, rngs: nnx.Rngs, std: float = 0.02
) -> nnx.Linear:
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=False,
        kernel_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _residual_std(config: LlamaConfig) -> float:
    return 0.02 / (2 * config.num_layers) ** 0.5  # as in models/gpt.py


def _norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def rotate(
    x_BTNH: jax.Array, theta: float, positions_BT: jax.Array | None = None
) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.2.2).

    Rotates each pair of dimensions (i, i + H/2), the layout of Hugging Face's
    checkpoints, by ``position / theta**(2i/H)``. Angles and products are in float32 or
    wider.

    Args:
      x_BTNH: queries or keys; H is even.
      theta: base of the wavelengths.
      positions_BT: integers; by default 0 to T-1 in each row. Those of packed documents
        begin again with each.

    Returns:
      The same shape and dtype.
    """
    T, H = x_BTNH.shape[1], x_BTNH.shape[3]
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequencies_I = theta ** -(jnp.arange(0, H, 2, dtype=dtype) / H)
    if positions_BT is None:
        angles = jnp.arange(T, dtype=dtype)[:, None] * frequencies_I  # (T, I)
    else:
        angles = positions_BT.astype(dtype)[..., None] * frequencies_I  # (B, T, I)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a_BTNI, b_BTNI = jnp.split(x_BTNH.astype(dtype), 2, axis=-1)
    turned = (a_BTNI * cos - b_BTNI * sin, b_BTNI * cos + a_BTNI * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Grouped queries: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, heads = config.width, config.num_heads
        kv_width = width // heads * config.num_kv_heads
        self.theta = config.rope_theta
        self.head_width = width // heads
        self.implementation = config.attention
        self.q = _linear(config, width, width, rngs)
        self.k = _linear(config, width, kv_width, rngs)
        self.v = _linear(config, width, kv_width, rngs)
        self.out = _linear(config, width, width, rngs, _residual_std(config))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the attention output, (B, T, D)."""

        def heads(x_BTE: jax.Array) -> jax.Array:
            return x_BTE.reshape(*x_BTE.shape[:2], -1, self.head_width)

        q_BTNH = rotate(heads(self.q(x_BTD)), self.theta)
        k_BTKH = rotate(heads(self.k(x_BTD)), self.theta)
        v_BTKH = heads(self.v(x_BTD))
        q_BTNH, k_BTKH, v_BTKH = (
            checkpoint_name(x, "qkv") for x in (q_BTNH, k_BTKH, v_BTKH)
        )
        y_BTNH = jshard.dot_product_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            is_causal=True,
            implementation=self.implementation,
        )
        y_BTD = checkpoint_name(y_BTNH.reshape(x_BTD.shape), "attended")
        return self.out(y_BTD)


class Block(nnx.Module):
    """Attention and gated MLP, each on a normalised residual branch.

    The MLP is SwiGLU (Shazeer 2020, arXiv:2002.05202, section 2).

    Activations have names, for ``jshard.Names`` and ``jshard.Offload``: "qkv" (queries
    and keys after their rotation, values), "attended" (before the output projection),
    "hidden" (the MLP's gate and up projections, before the nonlinearity).
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.gate = _linear(config, width, hidden, rngs)
        self.up = _linear(config, width, hidden, rngs)
        self.down = _linear(config, hidden, width, rngs, _residual_std(config))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the residual stream after this block, (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        normed_BTD = self.norm2(x_BTD)
        gate_BTF = checkpoint_name(self.gate(normed_BTD), "hidden")
        up_BTF = checkpoint_name(self.up(normed_BTD), "hidden")
        return x_BTD + self.down(jax.nn.silu(gate_BTF) * up_BTF)


class Llama(nnx.Module):
    """Tokens to logits; ``loss`` for training, without the logits of a whole batch.

    The names of its activations are those of ``Block``.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = jshard.Unit(
            nnx.Embed(
                config.vocab_size,
                config.width,
                embedding_init=nnx.initializers.normal(0.02),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
        )
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.norm = _norm(config, rngs)
        if not config.tied:
            self.head = jshard.Unit(
                _linear(config, config.width, config.vocab_size, rngs)
            )

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider."""
        x_BTD, head_DV = self._features_and_head(tokens_BT)
        return jnp.dot(
            x_BTD,
            head_DV.astype(x_BTD.dtype),
            preferred_element_type=jnp.promote_types(x_BTD.dtype, jnp.float32),
        )

    def loss(
        self, tokens_BT: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
    ) -> jshard.Mean:
        """Returns the cross-entropy in nats, a Mean weighted by ``weights_BT``."""
        x_BTD, head_DV = self._features_and_head(tokens_BT)
        return jshard.cross_entropy(
            x_BTD, head_DV, targets_BT, weights_BT, chunk=self.config.loss_chunk
        )

    def _features_and_head(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.config.tied:  # gathered once for both uses
            embed = jshard.gathered(self.embed)
            x_BTD = self.norm(self.blocks(embed(tokens_BT)))
            return x_BTD, embed.embedding.get_value().T
        x_BTD = self.embed(tokens_BT)
        head, x_BTD = jshard.gathered_during(self.head, self.blocks, x_BTD)
        return self.norm(x_BTD), head.kernel.get_value()
