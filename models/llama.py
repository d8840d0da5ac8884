"""A family of decoders: Llama, Mistral, Qwen, Gemma, Phi-3, OLMo, Mixtral and others.

With its defaults ``LlamaConfig`` is Llama 2 (Touvron et al. 2023, arXiv:2307.09288,
section 2.2). What other models do differently is a field of it, and
models/llama_families.py says which model has which. Where a paper leaves a detail
open, the models do what their reference code in Hugging Face's transformers does.

Shape suffixes: B batch, T time, D model width, F hidden width, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.inference.generation.kv_cache import KVCache, LatentCache
from jshard.models.decoder import Decoder, Features
from jshard.models.latent_attention import LatentAttention
from jshard.models.layers import embedding, linear, residual_std, rms_norm
from jshard.models.llama_attention import Attention, Stream
from jshard.models.llama_config import ACTIVATIONS, LlamaConfig
from jshard.models.moe import (
    Load,
    MixtureOfExperts,
    correct,
    load_balancing_loss,
    without_padding,
)
from jshard.nn import EmbeddingNoise, own_columns
from jshard.nn.tiles import tiled

__all__ = ["Block", "Llama", "LlamaConfig"]


class Block(nnx.Module):
    """Attention and gated MLP, each on a residual branch with norms before or after.

    Activations have names, for ``jshard.Names`` and ``jshard.Offload``: "qkv" (queries
    and keys after their rotation, values), "attended" (before the output projection),
    "hidden" (the MLP's gate and up projections, before the nonlinearity).
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.activation = ACTIVATIONS[config.activation]
        self.pre_norms, self.post_norms = config.pre_norms, config.post_norms
        if config.pre_norms:
            self.norm1 = _norm(config, rngs)
        attention = LatentAttention if config.kv_rank else Attention
        self.attention = attention(config, rngs=rngs)
        if config.pre_norms:
            self.norm2 = _norm(config, rngs)
        if config.post_norms:
            self.post_norm1, self.post_norm2 = _norm(config, rngs), _norm(config, rngs)
        self.has_experts, self.fused = config.num_experts > 0, config.fused
        hidden = config.shared_hidden if self.has_experts else config.hidden
        self.has_mlp, self.tile = hidden > 0, config.mlp_tile
        if self.has_experts:
            self.experts = MixtureOfExperts(config, rngs=rngs)
        if self.has_mlp:
            if config.fused:
                self.gate_up = linear(config, width, 2 * hidden, rngs, bias=False)
            else:
                self.gate = linear(config, width, hidden, rngs, bias=False)
                self.up = linear(config, width, hidden, rngs, bias=False)
            std = residual_std(config)
            self.down = linear(config, hidden, width, rngs, std, bias=False)

    @property
    def tensor_split(self) -> jshard.nn.Split | None:
        """The MLP's hidden features, beside those of experts."""
        if not self.has_mlp:
            return None
        columns = () if self.fused else ("gate", "up")
        return jshard.nn.Split(columns=columns, rows=("down",))

    def __call__(
        self,
        stream: Stream,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        counted_BT: jax.Array | None = None,
    ) -> Stream | tuple[Stream, Load]:
        """Returns the stream after this block, and the load of its experts if any.

        The load is that of the tokens in ``counted_BT``, or of all.
        """
        x_BTD, layer, _ = stream
        y_BTD = self.norm1(x_BTD) if self.pre_norms else x_BTD
        y_BTD, cache = self.attention(y_BTD, stream, positions_BT, segment_ids_BT)
        x_BTD = x_BTD + (self.post_norm1(y_BTD) if self.post_norms else y_BTD)
        y_BTD = self.norm2(x_BTD) if self.pre_norms else x_BTD
        y_BTD, load = self._mlp(y_BTD, counted_BT)
        x_BTD = x_BTD + (self.post_norm2(y_BTD) if self.post_norms else y_BTD)
        stream = Stream(x_BTD, None if layer is None else layer + 1, cache)
        return stream if load is None else (stream, load)

    def _mlp(
        self, x_BTD: jax.Array, counted_BT: jax.Array | None
    ) -> tuple[jax.Array, Load | None]:
        if not self.has_mlp:
            return self.experts(x_BTD, counted_BT)
        y_BTD = jshard.nn.tensor_parallel(self._gated, x_BTD)
        if not self.has_experts:
            return y_BTD, None
        of_experts_BTD, load = self.experts(x_BTD, counted_BT)
        return y_BTD + of_experts_BTD, load

    def _gated(self, x_BTD: jax.Array) -> jax.Array:
        if self.fused:
            hidden = self.gate_up.out_features // 2
            inner = (own_columns(self.gate_up, [hidden, hidden]),)
        else:
            inner = (self.gate, self.up)
        return tiled(self._products, (*inner, self.down), x_BTD, self.tile)

    def _products(self, modules: tuple, x_BTD: jax.Array) -> jax.Array:
        """Returns the gated MLP of (gate, up, down), or (gate_up, down)."""
        *inner, down = modules
        hidden = [layer(x_BTD) for layer in inner]
        if self.fused:
            hidden = jnp.split(hidden[0], 2, axis=-1)
        gate_BTF, up_BTF = (checkpoint_name(x, "hidden") for x in hidden)
        # Derivatives are computed again: that is cheaper than to store and read them.
        gated = jax.checkpoint(lambda gate, up: self.activation(gate) * up)
        return down(gated(gate_BTF, up_BTF))


class Llama(Decoder):
    """The decoder; the names of its activations are those of ``Block``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = jshard.Unit(embedding(config, config.vocab_size, rngs))
        first = config.dense_layers
        if first:
            dense = config.dense
            self.dense_blocks = jshard.Stack(
                lambda rngs: Block(dense, rngs=rngs), first, rngs=rngs
            )
        self.blocks = jshard.Stack(
            lambda rngs: Block(config, rngs=rngs), config.num_layers - first, rngs=rngs
        )
        self.norm = _norm(config, rngs)
        self.use_running_average = False  # eval() sets it: then nothing is corrected
        if not config.tied:
            self.head = jshard.Unit(
                linear(config, config.width, config.vocab_size, rngs, bias=False)
            )
        if config.neftune_alpha:
            self.noise = EmbeddingNoise(config.neftune_alpha, rngs=rngs)

    def features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: KVCache | LatentCache | None = None,
        weights_BT: jax.Array | None = None,
    ) -> Features:
        """Returns what the head is applied to; with a cache, for ``decode``.

        With a ``balance_weight``, the penalty is the experts' load-balancing loss. With
        a ``correction_rate``, training corrects the routers, as ``moe.correct`` says.
        Both leave out padding, as the targets' weights tell.
        """
        config, counted_BT, tokens = self.config, None, tokens_BT.size
        balanced = config.num_experts and (
            config.balance_weight or config.correction_rate
        )
        if balanced and weights_BT is not None:
            counted_BT = without_padding(weights_BT, segment_ids_BT)
            tokens = jnp.sum(counted_BT)
        counted = cache is not None or len(set(config.sliding_layers)) > 1
        layer = jnp.int32(0) if counted else None
        # Of a tied table both uses are gathered at once.
        embed = jshard.gathered(self.embed) if config.tied else self.embed
        x_BTD = embed(tokens_BT)
        if config.scaled_embeddings:
            x_BTD *= jnp.asarray(math.sqrt(config.width), x_BTD.dtype)
        if config.neftune_alpha:
            x_BTD = self.noise(x_BTD)
        stream, others = Stream(x_BTD, layer, cache), (positions_BT, segment_ids_BT)
        if config.dense_layers:
            stream = self.dense_blocks(stream, *others)
        inputs = stream, *others, counted_BT
        if config.tied:
            head, out = embed, self.blocks(*inputs)
        else:
            head, out = jshard.gathered(self.head, during=(self.blocks, *inputs))
        stream, load = out if config.num_experts else (out, None)
        penalty = None
        if load is not None and config.balance_weight:
            balance = load_balancing_loss(load, tokens)
            penalty = config.balance_weight * balance
        learns = cache is None and not self.use_running_average
        if load is not None and config.correction_rate and learns:
            correct(self.blocks.experts.router, load, config.correction_rate)
        table = isinstance(head, nnx.Embed)
        return Features(
            self.norm(stream.x_BTD),
            head.embedding.get_value().T if table else jshard.nn.kernel_of(head),
            config.logit_soft_cap or None,
            penalty,
            stream.cache,
        )

    def init_cache(self, batch: int, length: int) -> KVCache | LatentCache:
        """Returns an empty cache for ``batch`` rows of up to ``length`` tokens."""
        config = self.config
        K, H = config.num_kv_heads, config.H
        dtype = config.dtype or config.param_dtype
        if config.kv_rank:
            width = config.kv_rank + config.R
            return LatentCache.zeros(config.num_layers, batch, length, width, dtype)
        return KVCache.zeros(config.num_layers, batch, length, K, H, dtype)


def _norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    options = {"epsilon": config.norm_eps, "offset": config.norm_offset}
    return rms_norm(config, config.width, rngs, **options)
