"""Calls of cuDNN that JAX does not offer in public.

Flash attention over packed documents: ``jax._src.cudnn`` has had it since JAX 0.5
(jax-ml/jax#25812). If it breaks, attention with ``segment_ids_BT`` and ``max_segments``
cannot be traced for GPUs; all other attention is not affected. Tested with JAX 0.10.2,
0.11.2 and 0.12.0.1.

Products with block scales: XLA makes cuDNN's of a custom call
(``block_scaling_rewriter.cc``). If it breaks, steps with ``products="mxfp8"`` or
"nvfp4" cannot be compiled for GPUs. Tested with JAX 0.10.2 and 0.12.0.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


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


def block_scaled_primitive(elsewhere: Callable[..., jax.Array]) -> Primitive:
    """Makes "block_scaled_dot": ``lhs @ rhs.T``, with a scale for each block of a row.

    Its operands are two matrices, each as values and the scales of blocks (rows,
    blocks): float8 values (rows, depth) with uint8 exponents, or uint8 with two e2m1
    codes each (rows, depth / 2) and the bits of e4m3 scales. Then a float32 scalar
    follows, a power of two that multiplies the result. ``dtype`` is that of the result.
    On NVIDIA's GPUs it is cuDNN's product, and on other devices what ``elsewhere``
    computes of the first four operands.
    """
    primitive = Primitive("block_scaled_dot")

    @primitive.def_impl
    def run(*operands: jax.Array, **params: Any) -> jax.Array:
        return jax.jit(partial(primitive.bind, **params))(*operands)

    @primitive.def_abstract_eval
    def abstract(
        lhs: Any, _: Any, rhs: Any, *__: Any, dtype: Any, depth: int
    ) -> ShapedArray:
        return ShapedArray((lhs.shape[0], rhs.shape[0]), dtype)

    def call(
        lhs: jax.Array,
        lhs_scales: jax.Array,
        rhs: jax.Array,
        rhs_scales: jax.Array,
        *,
        dtype: Any,
        depth: int,
    ) -> Any:
        result = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[0]), dtype)
        scale = jnp.float8_e8m0fnu
        if lhs.dtype == jnp.uint8:
            scale = jnp.float8_e4m3fn
            lhs, rhs = (
                lax.bitcast_convert_type(x, jnp.float4_e2m1fn).reshape(-1, depth)
                for x in (lhs, rhs)
            )
        scales = (lax.bitcast_convert_type(x, scale) for x in (lhs_scales, rhs_scales))
        return jax.ffi.ffi_call(
            "__op$block_scaled_dot",
            result,
            custom_call_api_version=2,
            legacy_backend_config="{}",
        )(lhs, rhs, *scales)

    def lowered(product: Callable[..., jax.Array]) -> Any:
        # cuDNN multiplies by the scalar, too, from 9.13 on. Before, XLA makes kernels
        # of their own for it; what follows the call is fused with its readers.
        def whole(*operands: jax.Array, **params: Any) -> jax.Array:
            y = product(*operands[:4], **params)
            return y * operands[4].astype(y.dtype) if len(operands) == 5 else y

        return mlir.lower_fun(whole, multiple_results=False)

    mlir.register_lowering(primitive, lowered(elsewhere))
    mlir.register_lowering(primitive, lowered(call), platform="cuda")
    return primitive
