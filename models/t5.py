"""T5, an encoder-decoder (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

With its defaults ``T5Config`` is T5 v1.0 small. ``gated`` and ``tied=False`` make it
v1.1 (Shazeer 2020, arXiv:2002.05202, and the release notes of the t5 repository).

Encoder and decoder are a Stack each. All decoder layers read the encoder's output,
which is an argument of the decoder's Stack, as is the bias of relative positions: each
side has one table for all its layers, looked up once outside of the Stack.

Shape suffixes: B batch, S time of the inputs, T time of the decoder's tokens, Q and K
time of queries and of keys, D model width, N heads, H head width, F hidden width, V
vocabulary.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and details of a T5; the defaults are those of v1.0 small.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: layers of the encoder.
      num_decoder_layers: layers of the decoder.
      num_heads: N.
      head_width: H.
      width: D; N times H may differ from it.
      hidden: F, width of the MLP.
      gated: whether the MLP is GEGLU, as in v1.1, in place of ReLU.
      tied: whether the head is the transposed embedding, with features divided by the
        root of D, as in v1.0.
      buckets: number of classes of relative positions.
      max_distance: positions at least so far apart share the last class.
      norm_eps: added to the mean square in RMSNorm.
      dropout: rate, on embeddings, residual branches and final features.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      start_token: the decoder's first input token.
      dtype: of the computation.
      param_dtype: of the parameters.
    """

    vocab_size: int = 32128
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    head_width: int = 64
    width: int = 512
    hidden: int = 2048
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    dropout: float = 0.0
    loss_chunk: int = 1024
    start_token: int = 0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        # A side has the buckets to itself where it looks in one direction only.
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets:
            raise jshard.UserError(
                f"model: buckets={self.buckets} must be a multiple of 4, and "
                f"max_distance={self.max_distance} larger"
            )


def _linear(
    config: T5Config, size_in: int, size_out: int, std: float, rngs: nnx.Rngs
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


def _embed(
    config: T5Config, rows: int, width: int, std: float, rngs: nnx.Rngs
) -> nnx.Embed:
    return nnx.Embed(
        rows,
        width,
        embedding_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _norm(config: T5Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.width,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def position_buckets(
    queries: int, keys: int, *, bidirectional: bool, buckets: int, max_distance: int
) -> np.ndarray:
    """Returns the class of each relative position, int32 (Q, K).

    Half of the classes are for one distance each, the others for ranges that grow
    exponentially up to ``max_distance`` (section 2.1). A bidirectional side has half of
    all classes for keys after the query; otherwise such keys count as at distance 0.
    """
    distance = np.arange(queries)[:, None] - np.arange(keys)[None, :]
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    distance = np.maximum(distance, 0)
    exact = buckets // 2
    # In float32 like the reference code, so that ranges begin at the same distance.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    scale = np.float32(math.log(max_distance / exact))
    far = exact + (ratio / scale * np.float32(buckets - exact)).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(far, buckets - 1))
    return (offset + bucket).astype(np.int32)


class Attention(nnx.Module):
    """Attention to the same text or to another, with scores that are not scaled.

    The initial queries are smaller in turn (``t5.models`` of the reference code).
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        width, inner = config.width, config.num_heads * config.head_width
        self.head_width = config.head_width
        scaled = (width * config.head_width) ** -0.5
        self.q = _linear(config, width, inner, scaled, rngs)
        self.k = _linear(config, width, inner, width**-0.5, rngs)
        self.v = _linear(config, width, inner, width**-0.5, rngs)
        self.out = _linear(config, inner, width, inner**-0.5, rngs)

    def __call__(
        self,
        x_BQD: jax.Array,
        memory_BKD: jax.Array,
        bias_1NQK: jax.Array | None,
        mask_B1QK: jax.Array | None,
    ) -> jax.Array:
        """Returns the attention output, (B, Q, D).

        Args:
          x_BQD: what the queries come from.
          memory_BKD: what keys and values come from.
          bias_1NQK: added to the scores.
          mask_B1QK: which keys a query attends to; dimensions of size 1 are for all.
        """

        def heads(x_BTE: jax.Array) -> jax.Array:
            x_BTNH = x_BTE.reshape(*x_BTE.shape[:2], -1, self.head_width)
            return checkpoint_name(x_BTNH, "qkv")

        q_BQNH = heads(self.q(x_BQD))
        k_BKNH, v_BKNH = heads(self.k(memory_BKD)), heads(self.v(memory_BKD))
        y_BQNH = _attend(q_BQNH, k_BKNH, v_BKNH, bias_1NQK, mask_B1QK)
        y_BQE = y_BQNH.reshape(*x_BQD.shape[:2], -1)
        return self.out(checkpoint_name(y_BQE, "attended"))


def _attend(
    q_BQNH: jax.Array,
    k_BKNH: jax.Array,
    v_BKNH: jax.Array,
    bias_1NQK: jax.Array | None,
    mask_B1QK: jax.Array | None,
) -> jax.Array:
    """Returns attended values (B, Q, N, H); the softmax is in float32 or wider.

    Not ``jshard.dot_product_attention``, for kernels that store no scores have no
    gradient for a bias.
    """
    wide = jnp.promote_types(q_BQNH.dtype, jnp.float32)
    scores_BNQK = jnp.einsum(
        "BQNH,BKNH->BNQK", q_BQNH, k_BKNH, preferred_element_type=wide
    )
    if bias_1NQK is not None:
        scores_BNQK += bias_1NQK
    if mask_B1QK is not None:
        scores_BNQK = jnp.where(mask_B1QK, scores_BNQK, jnp.finfo(wide).min)
    weights_BNQK = jax.nn.softmax(scores_BNQK).astype(v_BKNH.dtype)
    return jnp.einsum("BNQK,BKNH->BQNH", weights_BNQK, v_BKNH)


class MLP(nnx.Module):
    """Two matrices with ReLU, or three with GEGLU."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.gated = config.gated
        self.up = _linear(config, width, hidden, width**-0.5, rngs)
        if config.gated:
            self.gate = _linear(config, width, hidden, width**-0.5, rngs)
        self.down = _linear(config, hidden, width, hidden**-0.5, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the MLP's output, (B, T, D)."""
        up_BTF = checkpoint_name(self.up(x_BTD), "hidden")
        if not self.gated:
            return self.down(jax.nn.relu(up_BTF))
        gate_BTF = checkpoint_name(self.gate(x_BTD), "hidden")
        return self.down(jax.nn.gelu(gate_BTF, approximate=True) * up_BTF)


class EncoderBlock(nnx.Module):
    """Self-attention and MLP, each on a normalised residual branch.

    Activations have names, for ``jshard.Names`` and ``jshard.Offload``: "qkv",
    "attended" (before the output projection), "hidden" (before the nonlinearity).
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x_BSD: jax.Array, bias_1NSS: jax.Array, mask_B11S: jax.Array | None
    ) -> jax.Array:
        """Returns the residual stream after this block, (B, S, D)."""
        h_BSD = self.norm1(x_BSD)
        x_BSD += self.dropout(self.attention(h_BSD, h_BSD, bias_1NSS, mask_B11S))
        return x_BSD + self.dropout(self.mlp(self.norm2(x_BSD)))


class DecoderBlock(nnx.Module):
    """Causal self-attention, attention to the encoder's output, and MLP.

    The names of its activations are those of ``EncoderBlock``.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.cross = Attention(config, rngs=rngs)
        self.norm3 = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        bias_1NTT: jax.Array,
        encoded_BSD: jax.Array,
        mask_B11S: jax.Array | None,
    ) -> jax.Array:
        """Returns the residual stream after this block, (B, T, D)."""
        h_BTD, T = self.norm1(x_BTD), x_BTD.shape[1]
        causal_11TT = jnp.tri(T, dtype=bool)[None, None]
        attended = self.attention(h_BTD, h_BTD, bias_1NTT, causal_11TT)
        x_BTD += self.dropout(attended)
        crossed = self.cross(self.norm2(x_BTD), encoded_BSD, None, mask_B11S)
        x_BTD += self.dropout(crossed)
        return x_BTD + self.dropout(self.mlp(self.norm3(x_BTD)))


class T5(nnx.Module):
    """Two texts to logits; ``loss`` for training, ``greedy`` for samples."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        width, buckets = config.width, (config.buckets, config.num_heads)
        self.embed = jshard.Unit(_embed(config, config.vocab_size, width, 1.0, rngs))
        self.encoder_bias = _embed(config, *buckets, width**-0.5, rngs)
        self.encoder = jshard.Stack(
            lambda rngs: EncoderBlock(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.encoder_norm = _norm(config, rngs)
        self.decoder_bias = _embed(config, *buckets, width**-0.5, rngs)
        self.decoder = jshard.Stack(
            lambda rngs: DecoderBlock(config, rngs=rngs),
            config.num_decoder_layers,
            rngs=rngs,
        )
        self.decoder_norm = _norm(config, rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        if not config.tied:
            self.head = jshard.Unit(
                _linear(config, width, config.vocab_size, width**-0.5, rngs)
            )

    def __call__(
        self,
        inputs_BS: jax.Array,
        tokens_BT: jax.Array,
        mask_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider.

        Args:
          inputs_BS: tokens of the encoder.
          tokens_BT: tokens of the decoder. Padding at their end needs no mask, for no
            token before it attends to it.
          mask_BS: which inputs are not padding, booleans; None if all are.
        """
        return _logits(*self._features(inputs_BS, tokens_BT, mask_BS))

    def loss(
        self,
        inputs_BS: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        mask_BS: jax.Array | None = None,
    ) -> jshard.Mean:
        """Returns the cross-entropy in nats, a Mean weighted by ``weights_BT``.

        The decoder reads the targets, one position later.
        """
        start_B1 = jnp.full_like(targets_BT[:, :1], self.config.start_token)
        tokens_BT = jnp.concatenate([start_B1, targets_BT[:, :-1]], axis=1)
        x_BTD, head_DV = self._features(inputs_BS, tokens_BT, mask_BS)
        return jshard.cross_entropy(
            x_BTD, head_DV, targets_BT, weights_BT, chunk=self.config.loss_chunk
        )

    def greedy(
        self, inputs_BS: jax.Array, length: int, mask_BS: jax.Array | None = None
    ) -> jax.Array:
        """Returns the decoder's likeliest tokens, one after the other, (B, length).

        In eval mode. There is no cache: each token decodes all positions again.
        """
        B, start = inputs_BS.shape[0], self.config.start_token
        embed, x_BSD, _ = self._embed(inputs_BS, inputs_BS[:, :0])
        encoded_BSD = self._encode(x_BSD, mask_BS)

        def step(tokens_BT: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BTD, head_DV = self._decode(embed, embed(tokens_BT), encoded_BSD, mask_BS)
            x_BD = lax.dynamic_index_in_dim(x_BTD, t, 1, keepdims=False)
            token_B = jnp.argmax(_logits(x_BD, head_DV), axis=-1).astype(jnp.int32)
            # The last token would be written beyond the end, where nothing is.
            return tokens_BT.at[:, t + 1].set(token_B, mode="drop"), token_B

        tokens_BT = jnp.full((B, length), start, jnp.int32)
        return lax.scan(step, tokens_BT, jnp.arange(length))[1].T

    def _features(
        self, inputs_BS: jax.Array, tokens_BT: jax.Array, mask_BS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the decoder's features (B, T, D), and the head (D, V) for them."""
        embed, x_BSD, x_BTD = self._embed(inputs_BS, tokens_BT)
        return self._decode(embed, x_BTD, self._encode(x_BSD, mask_BS), mask_BS)

    def _embed(
        self, inputs_BS: jax.Array, tokens_BT: jax.Array
    ) -> tuple[nnx.Embed, jax.Array, jax.Array]:
        """Returns the embedding, and both texts looked up in it, at once."""
        # Of a tied table all uses are gathered at once.
        embed = jshard.gathered(self.embed) if self.config.tied else self.embed
        x_BUD = embed(jnp.concatenate([inputs_BS, tokens_BT], axis=1))
        S = inputs_BS.shape[1]
        return embed, x_BUD[:, :S], x_BUD[:, S:]

    def _encode(self, x_BSD: jax.Array, mask_BS: jax.Array | None) -> jax.Array:
        """Returns the encoder's normalised features, (B, S, D)."""
        bias_1NSS = self._bias(self.encoder_bias, x_BSD.shape[1], bidirectional=True)
        x_BSD = self.encoder(self.dropout(x_BSD), bias_1NSS, _of_keys(mask_BS))
        return self.dropout(self.encoder_norm(x_BSD))

    def _decode(
        self,
        embed: nnx.Embed,
        x_BTD: jax.Array,
        encoded_BSD: jax.Array,
        mask_BS: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the decoder's features (B, T, D), and the head (D, V) for them."""
        bias_1NTT = self._bias(self.decoder_bias, x_BTD.shape[1], bidirectional=False)
        inputs = (self.dropout(x_BTD), bias_1NTT, encoded_BSD, _of_keys(mask_BS))
        if self.config.tied:
            x_BTD = self.decoder_norm(self.decoder(*inputs))
            scale = jnp.asarray(self.config.width**-0.5, x_BTD.dtype)
            return self.dropout(x_BTD) * scale, embed.embedding.get_value().T
        head, x_BTD = jshard.gathered_during(self.head, self.decoder, *inputs)
        return self.dropout(self.decoder_norm(x_BTD)), head.kernel.get_value()

    def _bias(self, table: nnx.Embed, length: int, *, bidirectional: bool) -> jax.Array:
        """Returns what is added to the scores of all layers of a side, (1, N, T, T)."""
        classes_TT = position_buckets(
            length,
            length,
            bidirectional=bidirectional,
            buckets=self.config.buckets,
            max_distance=self.config.max_distance,
        )
        return table(jnp.asarray(classes_TT)).transpose(2, 0, 1)[None]


def _of_keys(mask_BK: jax.Array | None) -> jax.Array | None:
    return None if mask_BK is None else mask_BK[:, None, None, :]


def _logits(x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    return jnp.dot(x_BTD, head_DV.astype(x_BTD.dtype), preferred_element_type=wide)
