"""Attention by the fastest kernel that can do it: cuDNN's if the target has one.

The target is known when a step is traced: inside ``shard_map`` it is the mesh's device,
which need not be present on this machine; elsewhere it is JAX's default backend.

Shape suffixes: B batch, T time, S time of the keys, N heads, K key-value heads, H head
width, M packed documents of a row.
"""

import math
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jshard.nn.blockwise_attention import Scores, blockwise_attention
from jshard.sharding.axes.context import on_whole_sequences
from jshard.sharding.settings.mesh import capability
from jshard.sharding.settings.policy import ATTENTION_OPERANDS
from jshard.system.compat.cudnn_calls import packed_attention
from jshard.system.errors import UserError, warn

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
    sinks_N: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Computes ``softmax(scale * q @ k.T) @ v`` per head (arXiv:1706.03762).

    - "cudnn" is flash attention (Dao 2023, arXiv:2307.08691), which never stores
      scores. It needs an NVIDIA GPU of compute capability 8.0 or more, bfloat16 or
      float16, heads whose width 8 divides and that is at most 128 (256 on Hopper), and
      neither ``soft_cap`` nor sinks; for packed documents capability 9.0 and
      ``max_segments``.
    - "blockwise" is plain JAX, with memory that grows with T + S (Rabe & Staats 2021,
      arXiv:2112.05682). It can do everything.
    - "xla" stores the scores of all pairs, (B, N, T, S), and has neither.
    - "auto" is "cudnn" if it can be used. Otherwise it is "blockwise" for a
      ``soft_cap`` or sinks and, on GPUs, for more than 1024 tokens, with a warning that
      says why; and else "xla".

    In a step that splits sequences over the mesh's "context" axis, queries, keys and
    ids are this device's parts, and devices exchange heads
    (``sharding/axes/context.py``).

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
      sinks_N: the score of one more key of each head, which has no value, as in gpt-oss
        (arXiv:2508.10925, section 2.1).
      implementation: "auto", "cudnn", "blockwise" or "xla".

    Returns:
      The attended values, (B, T, N, H), in the queries' dtype.

    Raises:
      UserError: the implementation is unknown or cannot be used, an option has no
        meaning, or the step is traced for an absent GPU outside
        ``jshard.plan.tracing_for``.
      ValueError: shapes or dtypes do not match.
    """
    scale = 1 / math.sqrt(q_BTNH.shape[-1]) if scale is None else scale
    scores = Scores(scale, is_causal, window, soft_cap, sinks_N is not None)

    def attend(q: Any, k: Any, v: Any, segment_ids: Any, sinks_N: Any) -> jax.Array:
        _check(q, k, segment_ids, max_segments, scores)
        packed = segment_ids is not None
        kernel = _choose(implementation, q, k, packed, max_segments, scores)
        if kernel == "cudnn":
            q, k, v = (checkpoint_name(x, ATTENTION_OPERANDS) for x in (q, k, v))
        with jax.named_scope(f"{kernel}-attention"):
            ids_BT = None if segment_ids is None else documents(segment_ids)
            if kernel == "blockwise":
                out = blockwise_attention(q, k, v, ids_BT, scores, sinks_N=sinks_N)
            else:
                out = _of_library(kernel, q, k, v, ids_BT, max_segments, scores)
            if ids_BT is None or max_segments is None:
                return out
            fits_B = ids_BT[:, -1] < max_segments
            return jnp.where(fits_B[:, None, None, None], out, jnp.nan)

    return on_whole_sequences(attend, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)


def _check(q: Any, k: Any, ids: Any, most: int | None, scores: Scores) -> None:
    """Raises UserError for options without a meaning."""
    window, soft_cap = scores.window, scores.soft_cap
    if window is not None and (window < 1 or not scores.is_causal):
        raise UserError(
            f"attention: window={window} must be at least 1, with is_causal=True"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise UserError(f"attention: soft_cap={soft_cap} must be above 0")
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


def _of_library(
    kernel: str, q: Any, k: Any, v: Any, ids_BT: Any, most: int | None, scores: Scores
) -> jax.Array:
    """Returns the attended values by XLA or cuDNN, as JAX calls them."""
    options: dict[str, Any] = {"scale": scores.scale, "is_causal": scores.is_causal}
    if ids_BT is not None and kernel == "cudnn":
        assert most is not None
        packed = starts_and_lengths(ids_BT, max(most, 2))
        return packed_attention(q, k, v, *packed, window=scores.window, **options)
    if ids_BT is not None:
        same_BTS = ids_BT[:, :, None] == ids_BT[:, None]
        options["mask"] = same_BTS[:, None]
    if scores.window:  # JAX leaves the position out
        options["local_window_size"] = (scores.window - 1, 0)
    options["implementation"] = kernel
    return jax.nn.dot_product_attention(q, k, v, **options)


def _choose(
    wanted: str, q: Any, k: Any, packed: bool, most: int | None, scores: Scores
) -> str:
    """Returns the kernel: "cudnn", "blockwise" or "xla"."""
    if wanted not in IMPLEMENTATIONS:
        raise UserError(
            f"attention {wanted!r} is unknown: use {', '.join(IMPLEMENTATIONS)}"
        )
    lacking = "soft cap" if scores.soft_cap is not None else None
    lacking = "sinks" if scores.has_sinks else lacking
    if wanted == "xla" and lacking:
        raise UserError(f"attention 'xla' has no {lacking}; use 'auto' or 'blockwise'")
    if wanted in ("xla", "blockwise"):
        return wanted
    platform, kind = _target()
    obstacle = _obstacle(q, packed, most, scores, platform, kind)
    if obstacle is None:
        return "cudnn"
    if wanted == "cudnn":
        raise UserError(f"attention 'cudnn' {obstacle}; use 'auto' or 'blockwise'")
    long = platform == "gpu" and max(q.shape[1], k.shape[1]) > _FEW
    if long:
        warn(
            f"attention: {KERNELS['blockwise-attention']}, several times slower than "
            f"{KERNELS['cudnn-attention']}, which {obstacle}"
        )
    return "blockwise" if long or lacking else "xla"


def _obstacle(
    q: Any, packed: bool, most: int | None, scores: Scores, platform: str, kind: str
) -> str | None:
    """Returns why cuDNN's attention cannot be used here; None if it can."""
    H = q.shape[-1]
    of_width = f"needs a head width that 8 divides, up to {_WIDEST_HEAD} "
    of_width += f"({_WIDEST_HEAD_ON_HOPPER} on Hopper), not {H}"
    if q.dtype not in _DTYPES:
        return f"needs bfloat16 or float16, not {q.dtype}"
    if H % 8 or H > _WIDEST_HEAD_ON_HOPPER:
        return of_width
    if scores.soft_cap is not None:
        return "has no soft cap"
    if scores.has_sinks:
        return "has no sinks"
    if packed and most is None:
        return "needs max_segments, the most documents of a row, with segment ids"
    if packed and q.size >= 2**31:
        return f"needs fewer than 2**31 elements with segment ids, not {q.size}"
    found = _capability(platform, kind)
    if found is None or found < _CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or more, not {kind}"
    if packed and found < _HOPPER:
        return f"needs compute capability 9.0 or more with segment ids, not {kind}"
    if H > _WIDEST_HEAD and found != _HOPPER:
        return of_width
    return None


def _target() -> tuple[str, str]:
    """Returns the target device's platform and kind."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform, device.device_kind
    platform = "gpu" if ABSENT_GPU.get() else jax.default_backend()  # not in a mesh
    return platform, platform


def _capability(platform: str, kind: str) -> tuple[int, ...] | None:
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
    return capability(local[0])


def documents(segment_ids_BT: jax.Array) -> jax.Array:
    """Numbers the documents of each row from 0, runs of equal ids: (B, T) int32."""
    begins = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def starts_and_lengths(
    document_BT: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Returns where documents start and how long they are, -1 for those not there.

    Starts are (B, M + 1), of which the last are -1, and lengths (B, M), both int32, for
    M, the ``most`` documents of a row; others are left out.
    """
    own_BTM = document_BT[:, :, None] == jnp.arange(most)
    length_BM = jnp.sum(own_BTM, axis=1, dtype=jnp.int32)
    start_BM = jnp.cumsum(length_BM, axis=1, dtype=jnp.int32) - length_BM
    start_BM, length_BM = (
        jnp.where(length_BM > 0, x, -1) for x in (start_BM, length_BM)
    )
    return jnp.pad(start_BM, ((0, 0), (0, 1)), constant_values=-1), length_BM
