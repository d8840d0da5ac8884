"""A BERT class encoder (Devlin et al. 2018, arXiv:1810.04805) with its language model.

It computes what Google's code does (github.com/google-research/bert, modeling.py), but
for the dropout of attention weights, which it does not have.

Shape suffixes: B batch, T time, S time of whole sequences, M masked places, D model
width, N heads, H head width, F hidden width, V vocabulary, E = D + 1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.models.layers import check_heads, check_known, embedding, layer_norm, linear

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder; the defaults are those of BERT base.

    Attributes:
      vocab_size: V, number of tokens.
      sequence_length: the longest T, number of learned positions.
      num_layers: number of blocks.
      num_heads: N.
      width: D; H is D / N.
      hidden: F, width of the MLP.
      token_types: how many kinds of tokens there are, as first and second sentence.
      norm_eps: added to variances.
      dropout: rate, on embeddings and on each residual branch.
      activation: "gelu", "gelu_tanh" or "relu".
      pooler: whether there are weights for ``pooled``.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      label_smoothing: of the targets of the loss, as in ``jshard.nn.cross_entropy``.
      z_loss: likewise.
      attention: "auto", "cudnn", "blockwise" or "xla" of
        ``jshard.nn.dot_product_attention``.
      max_segments: the most documents of a row, padding included; 0 is unknown.
      dtype: of the computation; None is that of the parameters, or what a policy says.
      param_dtype: of the parameters.
    """

    vocab_size: int = 30522
    sequence_length: int = 512
    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    hidden: int = 3072
    token_types: int = 2
    norm_eps: float = 1e-12
    dropout: float = 0.0
    activation: str = "gelu"
    pooler: bool = False
    loss_chunk: int = 1024
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    attention: str = "auto"
    max_segments: int = 0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        check_heads(self)
        check_known("activation", self.activation, ACTIVATIONS)


def _norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(config, rngs, config.norm_eps)


class Attention(nnx.Module):
    """Self-attention in both directions."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        self.q, self.k, self.v, self.out = (
            linear(config, width, width, rngs) for _ in range(4)
        )

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The heads."""
        counts = {"num_heads": self.config.num_heads}
        return jshard.nn.Split(columns=("q", "k", "v"), rows=("out",), counts=counts)

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        """Returns the attention output, (B, T, D)."""
        return jshard.nn.tensor_parallel(
            self._mixed, x_BTD, segment_ids_BT, tokens=("segment_ids_BT",)
        )

    def _mixed(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
        config = self.config

        def heads(x_BTE: jax.Array) -> jax.Array:
            H = config.width // config.num_heads
            x_BTNH = x_BTE.reshape(*x_BTE.shape[:2], -1, H)
            return checkpoint_name(x_BTNH, "qkv")

        bounded = segment_ids_BT is not None and config.max_segments > 0
        y_BTNH = jshard.nn.dot_product_attention(
            *(heads(project(x_BTD)) for project in (self.q, self.k, self.v)),
            segment_ids_BT=segment_ids_BT,
            max_segments=config.max_segments if bounded else None,
            implementation=config.attention,
        )
        y_BTE = y_BTNH.reshape(*x_BTD.shape[:2], -1)
        return self.out(checkpoint_name(y_BTE, "attended"))


class Block(nnx.Module):
    """Attention and MLP; the sum of a branch and its input is normalised."""

    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        self.norm1 = _norm(config, rngs)
        self.up = linear(config, config.width, config.hidden, rngs)
        self.down = linear(config, config.hidden, config.width, rngs)
        self.norm2 = _norm(config, rngs)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the residual stream after this block."""
        y_BTD = self.attention(x_BTD, segment_ids_BT)
        x_BTD = self.norm1(x_BTD + self.dropout(y_BTD))
        y_BTD = jshard.nn.tensor_parallel(self._mlp, x_BTD)
        return self.norm2(x_BTD + self.dropout(y_BTD))

    def _mlp(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = checkpoint_name(self.up(x_BTD), "hidden")
        # Its derivative is computed again: that is cheaper than to store and read it.
        return self.down(jax.checkpoint(self.activation)(h_BTF))


class Head(nnx.Module):
    """What the masked language model puts between the encoder and its embedding."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = linear(config, config.width, config.width, rngs)
        self.norm = _norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, config.param_dtype))
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns features, (..., D), and the bias of the logits, (V,)."""
        return self.norm(self.activation(self.dense(x))), self.bias.get_value()


class Bert(nnx.Module):
    """Tokens to the logits of masked ones; ``loss`` computes those alone."""

    splits_sequences = True  # positions, attention and ``loss`` know of it

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = jshard.Unit(embedding(config, config.vocab_size, rngs))
        self.positions = embedding(config, config.sequence_length, rngs)
        self.types = embedding(config, config.token_types, rngs)
        self.norm = _norm(config, rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.head = jshard.Unit(Head(config, rngs=rngs))
        if config.pooler:
            self.pooler = jshard.Unit(linear(config, config.width, config.width, rngs))

    def __call__(self, tokens_BT: jax.Array, **inputs: Any) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider; arguments as for ``encode``."""
        embed = jshard.gathered(self.embed)  # once for both uses
        x_BTD = self.encode(tokens_BT, embed=embed, **inputs)
        x_BTE, table_EV = self._with_bias(x_BTD, embed)
        wide = jnp.promote_types(x_BTE.dtype, jnp.float32)
        return jnp.dot(x_BTE, table_EV, preferred_element_type=wide)

    def loss(
        self,
        tokens_BT: jax.Array,
        places_BM: jax.Array,
        targets_BM: jax.Array,
        weights_BM: jax.Array,
        **inputs: Any,
    ) -> jshard.Mean:
        """Returns the cross-entropy of masked tokens in nats.

        Args:
          tokens_BT: tokens, some of them masked.
          places_BM: the places of those in their rows.
          targets_BM: what they were before.
          weights_BM: 1; 0 for places that only fill a row.
          **inputs: as for ``encode``.

        Returns:
          A Mean weighted by ``weights_BM``.
        """
        embed = jshard.gathered(self.embed)
        x_BTD = self.encode(tokens_BT, embed=embed, **inputs)
        # Of split sequences a device has some of the places, which may be anywhere.
        x_BSD = jshard.nn.whole_sequences(x_BTD)
        x_BMD = jnp.take_along_axis(x_BSD, places_BM[..., None], axis=1)
        x_BME, table_EV = self._with_bias(x_BMD, embed)
        return jshard.nn.cross_entropy(
            x_BME,
            table_EV,
            targets_BM,
            weights_BM,
            chunk=self.config.loss_chunk,
            label_smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss,
        )

    def encode(
        self,
        tokens_BT: jax.Array,
        *,
        token_types_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        embed: nnx.Embed | None = None,
    ) -> jax.Array:
        """Returns the features of all tokens, (B, T, D).

        Args:
          tokens_BT: tokens.
          token_types_BT: their kinds, by default 0.
          positions_BT: their positions, by default 0 to T-1 in each row.
          segment_ids_BT: integers; tokens attend only to the run of equal ids that they
            are in. That is the padding mask of rows with padding at an end, 1 for
            tokens and 0 for padding, or the documents of a packed row.
          embed: the table, where it is gathered for another use as well.
        """
        if positions_BT is None:
            positions_BT = jshard.nn.positions(tokens_BT.shape[1])
        if token_types_BT is None:
            token_types_BT = jnp.zeros(tokens_BT.shape, jnp.int32)
        x_BTD = (self.embed if embed is None else embed)(tokens_BT)
        x_BTD += self.positions(positions_BT) + self.types(token_types_BT)
        return self.blocks(self.dropout(self.norm(x_BTD)), segment_ids_BT)

    def pooled(self, tokens_BT: jax.Array, **inputs: Any) -> jax.Array:
        """Returns a vector for each row, (B, D), from the features of its first token.

        The model needs ``pooler``; arguments as for ``encode``.
        """
        return jnp.tanh(self.pooler(self.encode(tokens_BT, **inputs)[:, 0]))

    def _with_bias(self, x: jax.Array, embed: nnx.Embed) -> tuple[jax.Array, jax.Array]:
        """Returns features (..., E) and a table (E, V) whose product are logits.

        The last feature is 1, and the last row of the table is the bias.
        """
        x, bias_V = self.head(x)
        table_DV = embed.embedding.get_value().T
        table_EV = jnp.concatenate([table_DV, bias_V[None].astype(table_DV.dtype)])
        ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
        return jnp.concatenate([x, ones], axis=-1), table_EV.astype(x.dtype)
