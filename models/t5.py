"""T5, an encoder-decoder (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

With its defaults ``T5Config`` is T5 v1.0 small. ``gated`` and ``tied=False`` make it
v1.1 (Shazeer 2020, arXiv:2002.05202, and the release notes of the t5 repository).

Encoder and decoder are a Stack each. All decoder layers read the encoder's output,
which is an argument of the decoder's Stack, as is the bias of relative positions: each
side has one table for all its layers, looked up once outside of the Stack. To generate,
``encode`` has each decoder layer cache its keys and values of the encoder's output, and
``decode`` those of the new tokens.

Shape suffixes: B batch, S time of the inputs, T time of the decoder's tokens, L layers,
K slots of a cache, D model width, N heads, F hidden width, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.inference.generation import head_product
from jshard.inference.generation.kv_cache import KVCache
from jshard.models.layers import embedding, linear, rms_norm
from jshard.models.t5_attention import Attention, position_buckets
from jshard.models.t5_config import T5Config

__all__ = ["T5", "T5Cache", "T5Config"]


class T5Cache(NamedTuple):
    """What decoding has of the tokens so far, and of the inputs."""

    own: KVCache  # keys and values of the decoder's tokens
    crossed: KVCache  # keys and values of the encoder's output
    mask_BS: jax.Array  # which inputs are not padding


class Stream(NamedTuple):
    """What one decoder layer passes to the next when decoding with a cache."""

    x_BTD: jax.Array  # the residual stream
    own: KVCache  # keys and values of the decoder's tokens
    layer: jax.Array  # the number of the layer that comes


class Encoded(NamedTuple):
    """The encoder's output, of which all decoder layers give keys and values."""

    x_BSD: jax.Array


@jax.checkpoint
def _gelu_times(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate_BTF, approximate=True) * up_BTF


def _norm(config: T5Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return rms_norm(config, config.width, rngs, epsilon=config.norm_eps, offset=False)


class MLP(nnx.Module):
    """Two matrices with ReLU, or three with GEGLU."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.gated = config.gated
        self.up = linear(config, width, hidden, rngs, width**-0.5, bias=False)
        if config.gated:
            self.gate = linear(config, width, hidden, rngs, width**-0.5, bias=False)
        self.down = linear(config, hidden, width, rngs, hidden**-0.5, bias=False)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the MLP's output, (B, T, D)."""
        up_BTF = checkpoint_name(self.up(x_BTD), "hidden")
        if not self.gated:
            return self.down(jax.nn.relu(up_BTF))
        gate_BTF = checkpoint_name(self.gate(x_BTD), "hidden")
        # Derivatives are computed again: that is cheaper than to store and read them.
        return self.down(_gelu_times(gate_BTF, up_BTF))


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

    def __call__(self, stream: Any, *inputs: Any) -> Any:
        """Returns the stream after this block.

        The stream is the residual stream, (B, T, D), and ``inputs`` are those of
        ``_attend``; to decode with a cache it is a Stream, and they are those of
        ``_decode``. An Encoded comes back with this layer's keys and values of it.
        """
        if isinstance(stream, Encoded):
            return stream, self.cross.keys(stream.x_BSD)
        if isinstance(stream, Stream):
            return self._decode(stream, *inputs)
        return self._attend(stream, *inputs)

    def _attend(
        self,
        x_BTD: jax.Array,
        bias_1NTT: jax.Array,
        encoded_BSD: jax.Array,
        mask_B11S: jax.Array | None,
    ) -> jax.Array:
        h_BTD, T = self.norm1(x_BTD), x_BTD.shape[1]
        causal_11TT = jnp.tri(T, dtype=bool)[None, None]
        attended = self.attention(h_BTD, h_BTD, bias_1NTT, causal_11TT)
        x_BTD += self.dropout(attended)
        crossed = self.cross(self.norm2(x_BTD), encoded_BSD, None, mask_B11S)
        x_BTD += self.dropout(crossed)
        return x_BTD + self.dropout(self.mlp(self.norm3(x_BTD)))

    def _decode(
        self,
        stream: Stream,
        bias_BNTK: jax.Array,
        positions_BT: jax.Array,
        crossed: KVCache,
        mask_BS: jax.Array,
    ) -> Stream:
        x_BTD, own, layer = stream
        y_BTD, own = self.attention.decode(
            self.norm1(x_BTD), bias_BNTK, positions_BT, own, layer
        )
        x_BTD += y_BTD
        x_BTD += self.cross.decode_across(self.norm2(x_BTD), crossed, layer, mask_BS)
        x_BTD += self.mlp(self.norm3(x_BTD))
        return Stream(x_BTD, own, layer + 1)


class T5(nnx.Module):
    """Two texts to logits; ``loss`` for training, a cache for ``jshard.generate``."""

    splits_sequences = (
        "each token attends to two texts, of different lengths, with a bias for each "
        "pair of whole sequences' positions; use more devices of fsdp"
    )

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        width, std = config.width, config.width**-0.5
        bias = lambda: embedding(
            config, config.buckets, rngs, std, width=config.num_heads
        )
        self.embed = jshard.Unit(embedding(config, config.vocab_size, rngs, 1.0))
        self.encoder_bias = bias()
        self.encoder = jshard.Stack(
            lambda rngs: EncoderBlock(config, rngs=rngs), config.num_layers, rngs=rngs
        )
        self.encoder_norm = _norm(config, rngs)
        self.decoder_bias = bias()
        self.decoder = jshard.Stack(
            lambda rngs: DecoderBlock(config, rngs=rngs),
            config.num_decoder_layers,
            rngs=rngs,
        )
        self.decoder_norm = _norm(config, rngs)
        self.dropout = jshard.Dropout(config.dropout, rngs=rngs)
        if not config.tied:
            self.head = jshard.Unit(
                linear(config, width, config.vocab_size, rngs, std, bias=False)
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
        return jshard.nn.cross_entropy(
            x_BTD,
            head_DV,
            targets_BT,
            weights_BT,
            chunk=self.config.loss_chunk,
            label_smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss,
        )

    def encode(self, inputs_BS: jax.Array, mask_BS: jax.Array, length: int) -> T5Cache:
        """Returns the cache of inputs, with room for ``length`` tokens.

        Args:
          inputs_BS: tokens of the encoder.
          mask_BS: which of them are not padding, booleans.
          length: the most tokens that ``decode`` is to be given of a row.
        """
        config = self.config
        _, x_BSD, _ = self._embed(inputs_BS, inputs_BS[:, :0])
        encoded = Encoded(self._encode(x_BSD, mask_BS))
        _, (k_LBSNH, v_LBSNH) = self.decoder(encoded)
        L, B, _, N, H = k_LBSNH.shape
        dtype = config.dtype or config.param_dtype
        return T5Cache(
            KVCache.zeros(L, B, length, N, H, dtype),
            KVCache.stacked(k_LBSNH, v_LBSNH, dtype),
            mask_BS,
        )

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: T5Cache
    ) -> tuple[jax.Array, T5Cache]:
        """Returns the logits of new tokens, (B, T, V), and the cache with them.

        Args:
          tokens_BT: tokens that follow those in the cache; the first is
            ``config.start_token``.
          positions_BT: their positions; -1 for padding, which is written nowhere.
          cache: from ``encode`` or an earlier call.
        """
        embed = jshard.gathered(self.embed) if self.config.tied else self.embed
        stream, head_DV = self._decoded(
            embed,
            Stream(embed(tokens_BT), cache.own, jnp.int32(0)),
            self._bias_of_slots(positions_BT, cache.own.slots),
            positions_BT,
            cache.crossed,
            cache.mask_BS,
        )
        x_BTD = self._normalized(stream.x_BTD)
        logits_BTV = _logits(x_BTD, head_DV, head_product(self))
        return logits_BTV, cache._replace(own=stream.own)

    def _features(
        self, inputs_BS: jax.Array, tokens_BT: jax.Array, mask_BS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the decoder's features (B, T, D), and the head (D, V) for them."""
        embed, x_BSD, x_BTD = self._embed(inputs_BS, tokens_BT)
        encoded_BSD = self._encode(x_BSD, mask_BS)
        bias_1NTT = self._bias(self.decoder_bias, x_BTD.shape[1], bidirectional=False)
        x_BTD, head_DV = self._decoded(
            embed, self.dropout(x_BTD), bias_1NTT, encoded_BSD, _of_keys(mask_BS)
        )
        return self._normalized(x_BTD), head_DV

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

    def _decoded(
        self, embed: nnx.Embed, stream: Any, *inputs: Any
    ) -> tuple[Any, jax.Array]:
        """Returns the stream after the decoder's layers, and the head (D, V)."""
        if self.config.tied:
            return self.decoder(stream, *inputs), embed.embedding.get_value().T
        head, stream = jshard.gathered(
            self.head, during=(self.decoder, stream, *inputs)
        )
        return stream, jshard.nn.kernel_of(head)

    def _normalized(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the head is applied to."""
        x_BTD = self.dropout(self.decoder_norm(x_BTD))
        if not self.config.tied:
            return x_BTD
        return x_BTD * jnp.asarray(self.config.width**-0.5, x_BTD.dtype)

    def _bias(self, table: nnx.Embed, length: int, *, bidirectional: bool) -> jax.Array:
        """Returns what is added to the scores of all layers of a side, (1, N, T, T)."""
        classes_TT = self._classes(length, length, bidirectional=bidirectional)
        return table(jnp.asarray(classes_TT)).transpose(2, 0, 1)[None]

    def _bias_of_slots(self, positions_BT: jax.Array, slots: int) -> jax.Array:
        """Returns the decoder's bias between positions and slots, (B, N, T, K)."""
        classes_K = self._classes(slots, 1, bidirectional=False)[:, 0]  # by distance
        bias_KN = self.decoder_bias(jnp.asarray(classes_K))
        distance_BTK = positions_BT[..., None] - jnp.arange(slots)
        return bias_KN[jnp.clip(distance_BTK, 0, slots - 1)].transpose(0, 3, 1, 2)

    def _classes(self, queries: int, keys: int, *, bidirectional: bool) -> np.ndarray:
        return position_buckets(
            queries,
            keys,
            bidirectional=bidirectional,
            buckets=self.config.buckets,
            max_distance=self.config.max_distance,
        )


def _of_keys(mask_BK: jax.Array | None) -> jax.Array | None:
    return None if mask_BK is None else mask_BK[:, None, None, :]


def _logits(
    x_BTD: jax.Array, head_DV: jax.Array, dot: Any = lax.dot_general
) -> jax.Array:
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    dimensions = ((2,), (0,)), ((), ())
    head_DV = head_DV.astype(x_BTD.dtype)
    return dot(x_BTD, head_DV, dimensions, preferred_element_type=wide)
