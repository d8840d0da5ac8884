"""cuDNN's flash attention over packed documents, which ``jax.nn`` does not offer.

``jax._src.cudnn`` has had it since JAX 0.5 (jax-ml/jax#25812). Tested with JAX 0.10.2,
0.11.2 and 0.12.0.1. If it breaks, attention with ``segment_ids_BT`` and
``max_segments`` cannot be traced for GPUs; all other attention is not affected.
"""

from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn


def packed_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    starts_BM: jax.Array,
    lengths_BM: jax.Array,
    *,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> jax.Array:
    """Returns attention within each document, in the shape of the queries.

    Queries, keys and values are bfloat16 or float16. ``starts_BM``, int32, are the
    first positions of the M documents of each row, and ``lengths_BM`` their numbers of
    tokens; both have -1 for documents that a row does not have. There is one more
    start, always -1, and there are at least 3. ``window`` is the number of latest
    positions that one attends to, itself included.
    """
    masks = cudnn.MaskType
    attended: Any = cudnn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        q_seqlen=lengths_BM,
        kv_seqlen=lengths_BM,
        q_offsets=starts_BM,
        kv_offsets=starts_BM,
        scale=scale,
        mask_type=masks.PADDING_CAUSAL if is_causal else masks.PADDING,
        sliding_window_length=window,
    )
    return attended
