"""Attention by the fastest kernel that can do it: cuDNN's if the target has one.

The target is known when a step is traced: inside ``shard_map`` it is the mesh's device,
which need not be present on this machine; elsewhere it is JAX's default backend.

Shape suffixes: B batch, T time, S time of the keys, N heads, K key-value heads, H head
width.
"""

import dataclasses
import math
import warnings
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jshard.compat.packed_attention import packed_attention
from jshard.errors import UserError
from jshard.fsdp.activations import ATTENTION_OPERANDS
from jshard.fsdp.mesh import context_size
from jshard.nn.blockwise_attention import Scores, blockwise_attention
from jshard.nn.documents import documents, starts_and_lengths
from jshard.parallel.context import on_whole_sequences

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "blockwise")
# Scopes of the kernels, and what the start-up note says of them.
KERNELS = {
    "cudnn-attention": "cuDNN's flash attention",
    "blockwise-attention": "XLA's, block by block",
    "xla-attention": "XLA's, which stores the scores of all pairs",
}
# The capability of the absent GPU that jshard.plan traces a step for.
ABSENT_GPU: ContextVar[tuple[int, int] | None] = ContextVar("ABSENT_GPU", default=None)

_CAPABILITY = (8, 0)  # Ampere
_HOPPER = (9, 0)
_WIDEST_HEAD = 128
_WIDEST_HEAD_ON_HOPPER = 256  # backward; Blackwell needs cuDNN 9.23
_DTYPES = (jnp.bfloat16, jnp.float16)
_FEW = 1024  # tokens whose pairs of scores are little memory


def dot_product_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    is_causal: bool = False,
    segment_ids_BT: jax.Array | None = None,
    max_segments: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Computes ``softmax(scale * q @ k.T) @ v`` per head (arXiv:1706.03762).

    - "cudnn" is flash attention (Dao 2023, arXiv:2307.08691), which never stores
      scores. It needs an NVIDIA GPU of compute capability 8.0 or more, bfloat16 or
      float16, heads whose width 8 divides and that is at most 128 (256 on Hopper), and
      no ``soft_cap``; for packed documents capability 9.0 and ``max_segments``.
    - "blockwise" is plain JAX, with memory that grows with T + S (Rabe & Staats 2021,
      arXiv:2112.05682). It can do everything.
    - "xla" stores the scores of all pairs, (B, N, T, S), and has no ``soft_cap``.
    - "auto" is "cudnn" if it can be used. Otherwise it is "blockwise" for a
      ``soft_cap`` and, on GPUs, for more than 1024 tokens, with a warning that says
      why; and else "xla".

    In a step that splits sequences over the mesh's "context" axis, queries, keys and
    ids are this device's parts, and devices exchange heads (``parallel/context.py``).

    Args:
      q_BTNH: queries, floating.
      k_BSKH: keys, in the queries' dtype; each head serves N / K heads of queries.
      v_BSKH: values, like the keys.
      is_causal: whether position t attends only to positions up to t.
      segment_ids_BT: integers, for rows of packed documents: a document is a run of
        equal ids, and its positions attend only to each other. T = S.
      max_segments: the most documents that a row may hold. A row with more becomes nan,
        so that a run stops.
      window: position t attends only to the latest ``window`` positions, itself
        included, as in Mistral (arXiv:2310.06825, section 2). Needs ``is_causal``.
      soft_cap: c in ``c tanh(score / c)``, as in Gemma 2 (arXiv:2408.00118, section 2).
      scale: of the scores; by default 1 / sqrt(H).
      implementation: "auto", "cudnn", "blockwise" or "xla".

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype.

    Raises:
      UserError: the implementation is unknown or cannot be used, an option has no
        meaning, or the step is traced for an absent GPU outside
        ``jshard.plan.tracing_for``.
      ValueError: shapes or dtypes do not match.
    """
    if context_size() > 1:
        options = {
            "is_causal": is_causal,
            "max_segments": max_segments,
            "window": window,
            "soft_cap": soft_cap,
            "scale": scale,
            "implementation": implementation,
        }

        def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> jax.Array:
            return dot_product_attention(q, k, v, segment_ids_BT=segment_ids, **options)

        return on_whole_sequences(attend, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    call = _Call(is_causal, segment_ids_BT, max_segments, window, soft_cap, scale)
    call.check(q_BTNH, k_BSKH)
    kernel = _choose(implementation, q_BTNH, k_BSKH, call)
    qkv = (q_BTNH, k_BSKH, v_BSKH)
    if kernel == "cudnn":
        qkv = (checkpoint_name(x, ATTENTION_OPERANDS) for x in qkv)
    with jax.named_scope(f"{kernel}-attention"):
        return call.run(kernel, *qkv)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The options of a call, named as its arguments."""

    is_causal: bool
    segment_ids_BT: jax.Array | None
    max_segments: int | None
    window: int | None
    soft_cap: float | None
    scale: float | None

    def check(self, q: jax.Array, k: jax.Array) -> None:
        """Raises UserError for options without a meaning."""
        ids, window, most = self.segment_ids_BT, self.window, self.max_segments
        if window is not None and (window < 1 or not self.is_causal):
            raise UserError(
                f"attention: window={window} must be at least 1, with is_causal=True"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise UserError(f"attention: soft_cap={self.soft_cap} must be above 0")
        if most is not None and (most < 1 or ids is None):
            raise UserError(
                f"attention: max_segments={most} must be at least 1, with segment ids"
            )
        if ids is None:
            return
        if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != q.shape[:2]:
            raise UserError(
                f"attention: segment ids are {ids.dtype}{list(ids.shape)}; queries of "
                f"shape {list(q.shape)} need integers {list(q.shape[:2])}"
            )
        if q.shape[1] != k.shape[1]:
            raise UserError(
                "attention: segment ids need as many keys as queries, not "
                f"{k.shape[1]} and {q.shape[1]}"
            )

    def run(self, kernel: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Returns the attended values by one of the kernels."""
        document_BT = None
        if self.segment_ids_BT is not None:
            document_BT = documents(self.segment_ids_BT)
        out = self._attend(kernel, q, k, v, document_BT)
        if document_BT is None or self.max_segments is None:
            return out
        holds = document_BT[:, -1] < self.max_segments
        return jnp.where(holds[:, None, None, None], out, jnp.nan)

    def _attend(
        self, kernel: str, q: Any, k: Any, v: Any, document_BT: jax.Array | None
    ) -> jax.Array:
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        if kernel == "blockwise":
            scores = Scores(scale, self.is_causal, self.window, self.soft_cap)
            return blockwise_attention(q, k, v, document_BT, scores)
        if kernel == "cudnn" and document_BT is not None:
            assert self.max_segments is not None
            packed = starts_and_lengths(document_BT, max(self.max_segments, 2))
            options = {"scale": scale, "window": self.window}
            return packed_attention(
                q, k, v, *packed, is_causal=self.is_causal, **options
            )
        mask_B1TS = None
        if document_BT is not None:
            mask_B1TS = (document_BT[:, :, None] == document_BT[:, None])[:, None]
        window = self.window and (self.window - 1, 0)  # JAX leaves the position out
        options = {"is_causal": self.is_causal, "local_window_size": window}
        attend: Any = jax.nn.dot_product_attention
        return attend(
            q, k, v, None, mask_B1TS, scale=self.scale, implementation=kernel, **options
        )


def _choose(wanted: str, q: jax.Array, k: jax.Array, call: _Call) -> str:
    """Returns the kernel: "cudnn", "blockwise" or "xla"."""
    if wanted not in IMPLEMENTATIONS:
        raise UserError(
            f"attention {wanted!r} is unknown: use {', '.join(IMPLEMENTATIONS)}"
        )
    if wanted == "xla" and call.soft_cap is not None:
        raise UserError("attention 'xla' has no soft cap; use 'auto' or 'blockwise'")
    if wanted in ("xla", "blockwise"):
        return wanted
    platform, kind = _target()
    obstacle = _obstacle(q, call, platform, kind)
    if obstacle is None:
        return "cudnn"
    if wanted == "cudnn":
        raise UserError(f"attention 'cudnn' {obstacle}; use 'auto' or 'blockwise'")
    long = platform == "gpu" and max(q.shape[1], k.shape[1]) > _FEW
    if long:
        warnings.warn(
            f"attention: {KERNELS['blockwise-attention']}, several times slower than "
            f"{KERNELS['cudnn-attention']}, which {obstacle}",
            stacklevel=3,
        )
    return "blockwise" if long or call.soft_cap is not None else "xla"


def _obstacle(q: jax.Array, call: _Call, platform: str, kind: str) -> str | None:
    """Returns why cuDNN's attention cannot be used here; None if it can."""
    H, packed = q.shape[-1], call.segment_ids_BT is not None
    if q.dtype not in _DTYPES:
        return f"needs bfloat16 or float16, not {q.dtype}"
    if H % 8 or H > _WIDEST_HEAD_ON_HOPPER:
        return _of_width(H)
    if call.soft_cap is not None:
        return "has no soft cap"
    if packed and call.max_segments is None:
        return "needs max_segments, the most documents of a row, with segment ids"
    if packed and q.size >= 2**31:
        return f"needs fewer than 2**31 elements with segment ids, not {q.size}"
    capability = _capability(platform, kind)
    if capability is None or capability < _CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or more, not {kind}"
    if packed and capability < _HOPPER:
        return f"needs compute capability 9.0 or more with segment ids, not {kind}"
    if H > _WIDEST_HEAD and capability != _HOPPER:
        return _of_width(H)
    return None


def _of_width(H: int) -> str:
    return (
        f"needs a head width that 8 divides, up to {_WIDEST_HEAD} "
        f"({_WIDEST_HEAD_ON_HOPPER} on Hopper), not {H}"
    )


def _target() -> tuple[str, str]:
    """Returns the target device's platform and kind."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform, device.device_kind
    platform = "gpu" if ABSENT_GPU.get() else jax.default_backend()  # not in a mesh
    return platform, platform


def _capability(platform: str, kind: str) -> tuple[int, int] | None:
    """Returns the target's compute capability; None if it is no NVIDIA GPU."""
    if platform != "gpu":
        return None
    if (absent := ABSENT_GPU.get()) is not None:
        return absent
    local = [gpu for gpu in jax.local_devices() if gpu.platform == "gpu"]
    if not local:
        raise UserError(
            f"attention: no {kind} is present; trace the step "
            "in jshard.plan.tracing_for"
        )
    try:
        major, minor = map(int, local[0].compute_capability.split("."))
    except ValueError:  # an AMD GPU, like gfx942
        return None
    return major, minor
