"""DeepSeek's latent attention: keys and values from one small vector a token.

DeepSeek-V2 (arXiv:2405.04434, section 2.1). In training, keys and values of all heads
are computed from the tokens' latents. When decoding, the latents are the cache, and a
head's queries are projected to them instead: the same products in another order.

Shape suffixes: B batch, T time, D model width, N heads, H width of a head's queries and
keys, R the part of it that is rotated, P the part that is not, V width of a head's
values, C width of the latents, S slots of a cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.inference.generation import kv_cache
from jshard.models.layers import linear, residual_std, rms_norm
from jshard.models.llama_attention import Attention, Stream
from jshard.models.llama_config import LlamaConfig
from jshard.models.rope import rotate_by

_EPSILON = 1e-6  # of the latents' norms, whatever the config says, as in transformers


class LatentAttention(Attention):
    """Causal self-attention whose keys and values are projections of latents."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, N, H = config.width, config.num_heads, config.H
        C, R, V = config.kv_rank, config.R, config.value_width
        self.config = config

        def project(size_in: int, size_out: int) -> nnx.Linear:
            return linear(config, size_in, size_out, rngs, bias=False)

        def norm(size: int) -> nnx.RMSNorm:
            return rms_norm(config, size, rngs, epsilon=_EPSILON, offset=False)

        if config.q_rank:
            self.q_down, self.q_norm = (
                project(width, config.q_rank),
                norm(config.q_rank),
            )
        self.q = project(config.q_rank or width, N * H)
        self.kv_down, self.kv_norm = project(width, C + R), norm(C)
        self.kv = project(C, N * (H - R + V))
        self.out = linear(config, N * V, width, rngs, residual_std(config), bias=False)

    @property
    def tensor_split(self) -> jshard.nn.Split:
        """The heads; each device computes the latents of all tokens."""
        counts = {"num_heads": self.config.num_heads}
        return jshard.nn.Split(columns=("q", "kv"), rows=("out",), counts=counts)

    def _mixed(
        self,
        x_BTD: jax.Array,
        stream: Stream,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
    ) -> tuple[jax.Array, kv_cache.LatentCache | None]:
        config = self.config
        B, T, _ = x_BTD.shape
        C, H, R, V = config.kv_rank, config.H, config.R, config.value_width
        frequency_I, amplitude = self._rotation(False, x_BTD.dtype)

        def rotate(x_BTNR: jax.Array) -> jax.Array:
            # The files have the two dimensions of a pair beside each other.
            x_BTNR = jnp.concatenate([x_BTNR[..., ::2], x_BTNR[..., 1::2]], axis=-1)
            return rotate_by(x_BTNR, frequency_I, positions_BT, amplitude)

        inner = self.q_norm(self.q_down(x_BTD)) if config.q_rank else x_BTD
        q_BTNH = self.q(inner).reshape(B, T, -1, H)
        q_BTNP, q_BTNR = q_BTNH[..., : H - R], rotate(q_BTNH[..., H - R :])
        latent_BTC, k_BTR = jnp.split(self.kv_down(x_BTD), [C], axis=-1)
        latent_BTC, k_BT1R = self.kv_norm(latent_BTC), rotate(k_BTR[:, :, None])
        if stream.cache is not None:
            parts = q_BTNP, q_BTNR, latent_BTC, k_BT1R
            y_BTNV, cache = self._attend_to_latents(*parts, positions_BT, stream)
        else:
            kv_BTNX = self.kv(latent_BTC).reshape(B, T, -1, H - R + V)
            k_BTNP, v_BTNV = jnp.split(kv_BTNX, [H - R], axis=-1)
            k_BTNR = jnp.broadcast_to(k_BT1R, (*k_BTNP.shape[:-1], R))
            # Kernels want values as wide as keys.
            v_BTNH = jnp.pad(v_BTNV, [(0, 0), (0, 0), (0, 0), (0, H - V)])
            q_BTNH, k_BTNH = (
                jnp.concatenate(parts, axis=-1)
                for parts in ((q_BTNP, q_BTNR), (k_BTNP, k_BTNR))
            )
            qkv = tuple(checkpoint_name(x, "qkv") for x in (q_BTNH, k_BTNH, v_BTNH))
            y_BTNV = self._attend(False, qkv, segment_ids_BT)[..., :V]
            cache = None
        y_BTE = y_BTNV.reshape(B, T, -1)
        return self.out(checkpoint_name(y_BTE, "attended")), cache

    def _options(self) -> dict[str, Any]:
        """Returns the scale of the scores, which YaRN changes in these models."""
        config = self.config
        return {"scale": config.H**-0.5 * config.rope.temperature() ** 2}

    def _attend_to_latents(
        self,
        q_BTNP: jax.Array,
        q_BTNR: jax.Array,
        latent_BTC: jax.Array,
        k_BT1R: jax.Array,
        positions_BT: jax.Array | None,
        stream: Stream,
    ) -> tuple[jax.Array, kv_cache.LatentCache]:
        assert positions_BT is not None
        assert isinstance(stream.cache, kv_cache.LatentCache)
        assert stream.layer is not None
        C, P = self.config.kv_rank, q_BTNP.shape[-1]
        kernel = jshard.nn.kernel_of(self.kv).astype(q_BTNP.dtype)
        kernel_CNX = kernel.reshape(C, q_BTNP.shape[2], -1)
        wide = jnp.promote_types(q_BTNP.dtype, jnp.float32)
        q_BTNC = jnp.einsum("btnp,cnp->btnc", q_BTNP, kernel_CNX[..., :P])
        y_BTNC, cache = kv_cache.attend_to_latents(
            jnp.concatenate([q_BTNC, q_BTNR], axis=-1),
            jnp.concatenate([latent_BTC, k_BT1R[:, :, 0]], axis=-1),
            C,
            positions_BT,
            stream.cache,
            stream.layer,
            scale=self._options()["scale"],
        )
        y_BTNV = jnp.einsum(
            "btnc,cnv->btnv", y_BTNC, kernel_CNX[..., P:], preferred_element_type=wide
        )
        return y_BTNV.astype(q_BTNP.dtype), cache
