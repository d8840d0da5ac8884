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

    Args:
      q_BTNH: queries, bfloat16 or float16.
      k_BTKH: keys.
      v_BTKH: values.
      starts_BM: int32, the first position of each of the M documents of a row and then
        -1 for those it does not have; the last of at least 3 is always -1.
      lengths_BM: int32, their numbers of tokens, or -1; one fewer than ``starts_BM``.
      scale: of the scores.
      is_causal: whether a position attends to none after it.
      window: the number of latest positions that it attends to, itself included.
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
