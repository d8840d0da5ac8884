"""A family of decoders: Llama, Mistral, Qwen, Gemma, Mixtral and Qwen's experts.

With its defaults ``LlamaConfig`` is Llama 2 (Touvron et al. 2023, arXiv:2307.09288,
section 2.2). What other models do differently is a field of it, and
models/llama_huggingface.py says which model has which. Where a paper leaves a detail
open, the models do what their reference code in Hugging Face's transformers does.

Shape suffixes: B batch, T time, D model width, N heads, K key-value heads, H head
width, F hidden width, V vocabulary, L layers, S slots of a cache.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.nn import kv_cache
from models.llama_config import ACTIVATIONS, LlamaConfig
from models.moe import Load, MixtureOfExperts, load_balancing_loss
from models.rope import Rope, rotate, rotate_by

__all__ = ["Block", "Llama", "LlamaConfig", "rotate"]


def _linear(
    config: LlamaConfig,
    size_in: int,
    size_out: int,
    rngs: nnx.Rngs,
    std: float = 0.02,
    *,
    bias: bool = False,
) -> nnx.Linear:
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=bias,
        kernel_init=nnx.initializers.normal(std),
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _residual_std(config: LlamaConfig) -> float:
    return 0.02 / (2 * config.num_layers) ** 0.5  # as in models/gpt.py


def _norm(
    config: LlamaConfig, rngs: nnx.Rngs, features: int | None = None
) -> nnx.RMSNorm:
    offset: dict[str, Any] = {
        "scale_init": nnx.initializers.zeros,
        "promote_dtype": _with_offset,
    }
    return nnx.RMSNorm(
        features or config.width,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
        **offset if config.norm_offset else {},
    )


def _with_offset(values: tuple[jax.Array, jax.Array], *, dtype: Any) -> tuple:
    """Returns RMSNorm's input and 1 + its scale, which stays in float32 or wider."""
    x, scale = values
    wide = jnp.promote_types(scale.dtype, jnp.float32)
    return x.astype(dtype), 1 + scale.astype(wide)


class Stream(NamedTuple):
    """What one layer passes to the next.

    Attributes:
      x_BTD: the residual stream.
      layer: the number of the layer that comes, where layers differ or have a cache.
      cache: keys and values of all layers, when decoding.
    """

    x_BTD: jax.Array
    layer: jax.Array | None = None
    cache: kv_cache.KVCache | None = None


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Grouped queries: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, H = config.width, config.H
        kv_width = H * config.num_kv_heads
        self.config = config
        self.q = _linear(
            config, width, H * config.num_heads, rngs, bias=config.qkv_bias
        )
        self.k = _linear(config, width, kv_width, rngs, bias=config.qkv_bias)
        self.v = _linear(config, width, kv_width, rngs, bias=config.qkv_bias)
        self.out = _linear(
            config,
            H * config.num_heads,
            width,
            rngs,
            _residual_std(config),
            bias=config.out_bias,
        )
        if config.qk_norm:
            self.q_norm = _norm(config, rngs, H)
            self.k_norm = _norm(config, rngs, H)

    def __call__(
        self,
        x_BTD: jax.Array,
        stream: Stream,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, kv_cache.KVCache | None]:
        """Returns the attention output, (B, T, D), and the cache with these tokens."""
        config = self.config

        def heads(x_BTE: jax.Array) -> jax.Array:
            return x_BTE.reshape(*x_BTE.shape[:2], -1, config.H)

        q_BTNH, k_BTKH = heads(self.q(x_BTD)), heads(self.k(x_BTD))
        if config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        sliding = self._is_sliding(stream.layer)
        frequency_I, amplitude = self._rotation(sliding, x_BTD.dtype)
        q_BTNH, k_BTKH = (
            rotate_by(x, frequency_I, positions_BT, amplitude) for x in (q_BTNH, k_BTKH)
        )
        v_BTKH = heads(self.v(x_BTD))
        q_BTNH, k_BTKH, v_BTKH = (
            checkpoint_name(x, "qkv") for x in (q_BTNH, k_BTKH, v_BTKH)
        )
        qkv = (q_BTNH, k_BTKH, v_BTKH)
        if stream.cache is None:
            y_BTNH, cache = self._attend(sliding, qkv, segment_ids_BT), None
        else:
            y_BTNH, cache = self._attend_to_cache(sliding, qkv, positions_BT, stream)
        y_BTE = y_BTNH.reshape(*x_BTD.shape[:2], -1)
        return self.out(checkpoint_name(y_BTE, "attended")), cache

    def _is_sliding(self, layer: jax.Array | None) -> bool | jax.Array:
        """Returns whether this layer has a window, as an array where layers differ."""
        sliding_L = self.config.sliding_layers
        if len(set(sliding_L)) == 1:
            return sliding_L[0]
        return jnp.asarray(sliding_L)[layer]

    def _rotation(self, sliding: bool | jax.Array, dtype: Any) -> tuple[Any, Any]:
        """Returns the frequencies of this layer's rotation, (I,), and its amplitude."""
        config, wide = self.config, jnp.promote_types(dtype, jnp.float32)

        def of(rope: Rope) -> tuple[jax.Array, float]:
            return rope.frequencies(config.H, wide), rope.amplitude()

        full = of(config.rope)
        if not config.sliding_theta or sliding is False:
            return full
        local = of(Rope(config.sliding_theta))
        if sliding is True:
            return local
        return jax.tree.map(lambda a, b: jnp.where(sliding, a, b), local, full)

    def _options(self) -> dict[str, float]:
        """Returns the options of the scores, without those that are not used."""
        config = self.config
        scale = config.attention_scale and config.attention_scale**-0.5
        options = {"scale": scale, "soft_cap": config.attention_soft_cap}
        return {name: value for name, value in options.items() if value}

    def _attend(
        self,
        sliding: bool | jax.Array,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        config = self.config
        options: dict[str, Any] = self._options()
        if segment_ids_BT is not None:
            options["segment_ids_BT"] = segment_ids_BT
            options["max_segments"] = config.max_segments or None

        attend = functools.partial(
            jshard.dot_product_attention,
            is_causal=True,
            implementation=config.attention,
            **options,
        )
        # Kernels for GPUs want to know the window when they are compiled.
        attend_near = functools.partial(attend, window=config.window)
        if isinstance(sliding, bool):
            return attend_near(*qkv) if sliding else attend(*qkv)
        return lax.cond(sliding, attend_near, attend, *qkv)

    def _attend_to_cache(
        self,
        sliding: bool | jax.Array,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        positions_BT: jax.Array | None,
        stream: Stream,
    ) -> tuple[jax.Array, kv_cache.KVCache]:
        assert positions_BT is not None
        assert stream.cache is not None
        assert stream.layer is not None
        window = None
        if sliding is not False:
            slots = stream.cache.slots
            window = jnp.where(sliding, self.config.window, slots)
        return kv_cache.attend(
            *qkv,
            positions_BT,
            stream.cache,
            stream.layer,
            window=window,
            **self._options(),
        )


class Block(nnx.Module):
    """Attention and gated MLP, each on a normalised residual branch.

    Activations have names, for ``jshard.Names`` and ``jshard.Offload``: "qkv" (queries
    and keys after their rotation, values), "attended" (before the output projection),
    "hidden" (the MLP's gate and up projections, before the nonlinearity).
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, hidden = config.width, config.hidden
        self.activation = ACTIVATIONS[config.activation]
        self.norm1 = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = _norm(config, rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.post_norm1, self.post_norm2 = _norm(config, rngs), _norm(config, rngs)
        self.has_experts = config.num_experts > 0
        if self.has_experts:
            self.experts = MixtureOfExperts(
                width,
                hidden,
                config.num_experts,
                config.experts_per_token,
                normalized=config.normalized_experts,
                activation=self.activation,
                residual_std=_residual_std(config),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )
        else:
            self.gate = _linear(config, width, hidden, rngs)
            self.up = _linear(config, width, hidden, rngs)
            self.down = _linear(config, hidden, width, rngs, _residual_std(config))

    def __call__(
        self,
        stream: Stream,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> Stream | tuple[Stream, Load]:
        """Returns the stream after this block, and the load of its experts if any."""
        x_BTD, layer, _ = stream
        y_BTD, cache = self.attention(
            self.norm1(x_BTD), stream, positions_BT, segment_ids_BT
        )
        x_BTD = x_BTD + (self.post_norm1(y_BTD) if self.post_norms else y_BTD)
        y_BTD, load = self._mlp(self.norm2(x_BTD))
        x_BTD = x_BTD + (self.post_norm2(y_BTD) if self.post_norms else y_BTD)
        stream = Stream(x_BTD, None if layer is None else layer + 1, cache)
        return stream if load is None else (stream, load)

    def _mlp(self, x_BTD: jax.Array) -> tuple[jax.Array, Load | None]:
        if self.has_experts:
            return self.experts(x_BTD)
        gate_BTF = checkpoint_name(self.gate(x_BTD), "hidden")
        up_BTF = checkpoint_name(self.up(x_BTD), "hidden")
        return self.down(self.activation(gate_BTF) * up_BTF), None


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

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider.

        Args:
          tokens_BT: tokens.
          positions_BT: their positions, by default 0 to T-1 in each row.
          segment_ids_BT: which document of a packed row each token belongs to; tokens
            attend only to their own document, a run of equal ids.
        """
        out = self._features(tokens_BT, positions_BT, segment_ids_BT)
        return self._logits(out.x_BTD, out.head_DV)

    def loss(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jshard.Mean | jshard.Loss:
        """Returns the cross-entropy in nats, a Mean weighted by ``weights_BT``.

        With a ``balance_weight``, the experts' load-balancing loss is added.
        """
        out = self._features(tokens_BT, positions_BT, segment_ids_BT)
        cross_entropy = jshard.cross_entropy(
            out.x_BTD,
            out.head_DV,
            targets_BT,
            weights_BT,
            chunk=self.config.loss_chunk,
            soft_cap=self.config.logit_soft_cap or None,
        )
        if out.load is None or not self.config.balance_weight:
            return cross_entropy
        balance = load_balancing_loss(out.load, tokens_BT.size)
        return cross_entropy + self.config.balance_weight * balance

    def init_cache(self, batch: int, length: int) -> kv_cache.KVCache:
        """Returns an empty cache for ``batch`` rows of up to ``length`` tokens."""
        config = self.config
        return kv_cache.KVCache.zeros(
            config.num_layers,
            batch,
            length,
            config.num_kv_heads,
            config.H,
            config.dtype,
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
        out = self._features(tokens_BT, positions_BT, cache=cache)
        assert out.cache is not None
        return self._logits(out.x_BTD, out.head_DV), out.cache

    def _features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None = None,
        cache: kv_cache.KVCache | None = None,
    ) -> "_Features":
        config = self.config
        counted = cache is not None or len(set(config.sliding_layers)) > 1
        layer = jnp.int32(0) if counted else None
        # Of a tied table both uses are gathered at once.
        embed = jshard.gathered(self.embed) if config.tied else self.embed
        x_BTD = embed(tokens_BT)
        if config.scaled_embeddings:
            x_BTD *= jnp.asarray(math.sqrt(config.width), x_BTD.dtype)
        inputs = Stream(x_BTD, layer, cache), positions_BT, segment_ids_BT
        if config.tied:
            head, out = embed, self.blocks(*inputs)
        else:
            head, out = jshard.gathered_during(self.head, self.blocks, *inputs)
        stream, load = out if config.num_experts else (out, None)
        x_BTD = self.norm(stream.x_BTD)
        table = isinstance(head, nnx.Embed)
        head_DV = head.embedding.get_value().T if table else head.kernel.get_value()
        return _Features(x_BTD, head_DV, load, stream.cache)

    def _logits(self, x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        head_DV = head_DV.astype(x_BTD.dtype)
        logits_BTV = jnp.dot(x_BTD, head_DV, preferred_element_type=wide)
        cap = self.config.logit_soft_cap
        return cap * jnp.tanh(logits_BTV / cap) if cap else logits_BTV


class _Features(NamedTuple):
    """What the head is applied to: normalised features, and what came with them."""

    x_BTD: jax.Array
    head_DV: jax.Array
    load: Load | None
    cache: kv_cache.KVCache | None
