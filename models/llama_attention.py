"""Attention of the decoder family: grouped queries, rotary positions, windows.

Shape suffixes: B batch, T time, D model width, E width of all heads, N heads, K
key-value heads, H head width, I pairs of its dimensions, L layers, S slots of a cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.inference.generation import kv_cache
from jshard.models.layers import linear, residual_std, rms_norm
from jshard.models.llama_config import LlamaConfig
from jshard.models.rope import Rope, rotate_some
from jshard.nn import norm_columns, on_whole_sequences, own_columns


class Stream(NamedTuple):
    """What one layer passes to the next.

    Attributes:
      x_BTD: the residual stream.
      layer: the number of the layer that comes, where layers differ or have a cache.
      cache: keys and values of all layers, or their latents, when decoding.
    """

    x_BTD: jax.Array
    layer: jax.Array | None = None
    cache: kv_cache.KVCache | kv_cache.LatentCache | None = None


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped queries.

    Grouped queries: Ainslie et al. 2023, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, bias = config.width, config.qkv_bias
        queries, keys = config.H * config.num_heads, config.H * config.num_kv_heads
        self.config = config
        if config.fused:
            self.qkv = linear(config, width, queries + 2 * keys, rngs, bias=bias)
        else:
            self.q = linear(config, width, queries, rngs, bias=bias)
            self.k = linear(config, width, keys, rngs, bias=bias)
            self.v = linear(config, width, keys, rngs, bias=bias)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(config.num_heads, config.param_dtype))
        std = residual_std(config)
        self.out = linear(config, queries, width, rngs, std, bias=config.out_bias)
        if config.qk_norm:
            options = {"epsilon": config.norm_eps, "offset": config.norm_offset}
            sizes = (queries, keys) if config.joint_qk_norm else (config.H, config.H)
            self.q_norm = rms_norm(config, sizes[0], rngs, **options)
            self.k_norm = rms_norm(config, sizes[1], rngs, **options)

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The heads."""
        config = self.config
        return jshard.nn.Split(
            columns=() if config.fused else ("q", "k", "v"),
            rows=("out",),
            dims={"sinks": -1} if config.sinks else {},
            counts={"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads},
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        stream: Stream,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, kv_cache.KVCache | kv_cache.LatentCache | None]:
        """Returns the attention output, (B, T, D), and the cache with these tokens."""
        if stream.cache is not None:
            return self._mixed(x_BTD, stream, positions_BT, segment_ids_BT)

        def mixed(x_BTD: Any, positions_BT: Any, segment_ids_BT: Any) -> jax.Array:
            return self._mixed(x_BTD, stream, positions_BT, segment_ids_BT)[0]

        inputs, tokens = (
            (positions_BT, segment_ids_BT),
            ("positions_BT", "segment_ids_BT"),
        )
        return jshard.nn.tensor_parallel(mixed, x_BTD, *inputs, tokens=tokens), None

    def _mixed(
        self,
        x_BTD: jax.Array,
        stream: Stream,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, kv_cache.KVCache | kv_cache.LatentCache | None]:
        config = self.config
        q_BTNH, k_BTKH, v_BTKH = self._heads(x_BTD)
        if config.qk_norm and not config.joint_qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        sliding = self._is_sliding(stream.layer)
        frequency_I, amplitude = self._rotation(sliding, x_BTD.dtype)
        q_BTNH, k_BTKH = (
            rotate_some(x, frequency_I, positions_BT, amplitude)
            for x in (q_BTNH, k_BTKH)
        )
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

    def _heads(self, x_BTD: jax.Array) -> list[jax.Array]:
        """Returns queries, (B, T, N, H), keys and values, (B, T, K, H)."""
        config = self.config
        if config.fused:
            N, K = config.num_heads, config.num_kv_heads
            sizes = [config.H * heads for heads in (N, K, K)]
            qkv_BTE = own_columns(self.qkv, sizes)(x_BTD)
            n = sum(sizes) // qkv_BTE.shape[-1]
            ends = config.H * N // n, config.H * (N + K) // n
            qkv = jnp.split(qkv_BTE, ends, axis=-1)
        else:
            qkv = [self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)]
        if config.joint_qk_norm:
            qkv[0] = norm_columns(self.q_norm, qkv[0])
            qkv[1] = norm_columns(self.k_norm, qkv[1])
        return [x_BTE.reshape(*x_BTE.shape[:2], -1, config.H) for x_BTE in qkv]

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
            return rope.frequencies(config.R, wide), rope.amplitude()

        full = of(config.rope)
        if not config.sliding_theta or sliding is False:
            return full
        local = of(Rope(config.sliding_theta))
        if sliding is True:
            return local
        return jax.tree.map(lambda a, b: jnp.where(sliding, a, b), local, full)

    def _options(self) -> dict[str, Any]:
        """Returns the options of the scores, without those that are not used."""
        config = self.config
        scale = config.attention_scale and config.attention_scale**-0.5
        options = {"scale": scale, "soft_cap": config.attention_soft_cap}
        return {name: value for name, value in options.items() if value}

    def _sinks(self) -> jax.Array | None:
        return self.sinks.get_value() if self.config.sinks else None

    def _attend(
        self,
        sliding: bool | jax.Array,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        config = self.config

        def attend_whole(
            q: Any, k: Any, v: Any, segment_ids: Any, sinks_N: Any
        ) -> jax.Array:
            options: dict[str, Any] = {**self._options(), "sinks_N": sinks_N}
            if segment_ids is not None:
                options["segment_ids_BT"] = segment_ids
                options["max_segments"] = config.max_segments or None

            attend = functools.partial(
                jshard.nn.dot_product_attention,
                is_causal=True,
                implementation=config.attention,
                **options,
            )
            # Kernels for GPUs want to know the window when they are compiled.
            attend_near = functools.partial(attend, window=config.window)
            if isinstance(sliding, bool):
                return attend_near(q, k, v) if sliding else attend(q, k, v)
            return lax.cond(sliding, attend_near, attend, q, k, v)

        return on_whole_sequences(attend_whole, *qkv, segment_ids_BT, self._sinks())

    def _attend_to_cache(
        self,
        sliding: bool | jax.Array,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        positions_BT: jax.Array | None,
        stream: Stream,
    ) -> tuple[jax.Array, kv_cache.KVCache]:
        assert positions_BT is not None
        assert isinstance(stream.cache, kv_cache.KVCache)
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
            sinks_N=self._sinks(),
            **self._options(),
        )
