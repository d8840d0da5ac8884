"""Which operations treat the layers of a Stack, its arrays' first dimension, apart."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend import core

_ELEMENTWISE = set(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type "
    "cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf "
    "erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log "
    "log1p logistic lt max min mul ne neg nextafter not or population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor"
    "".split()
)
# Along one dimension or some, by the name of the parameter that says which.
_ALONG = {
    "reduce_sum": "axes",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_prod": "axes",
    "reduce_and": "axes",
    "reduce_or": "axes",
    "argmax": "axes",
    "argmin": "axes",
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "concatenate": "dimension",
    "sort": "dimension",
    "squeeze": "dimensions",
    "rev": "dimensions",
    "iota": "dimension",
    "split": "axis",
}
# Parameters that name sizes, which the results' shapes repeat.
_SIZES = {"shape", "new_sizes", "sharding"}


def is_independent(eqn: Any, cut: Any, length: Callable[[Any], int]) -> bool:
    """Whether each layer of an equation's results depends on that layer alone.

    Args:
      eqn: the equation on (L, ...) arrays.
      cut: the same on (1, ...) arrays.
      length: the number of layers of a variable of ``eqn``, 0 where it has none.
    """
    lengths = {length(v) for v in eqn.outvars}
    if len(lengths) != 1 or 0 in lengths or not _same(eqn, cut):
        return False
    if not {length(v) for v in eqn.invars} <= lengths | {0}:
        return False
    name, params = eqn.primitive.name, eqn.params
    layered = [bool(length(v)) for v in eqn.invars]
    if name in _ELEMENTWISE:
        pairs = zip(eqn.invars, layered, strict=True)
        return all(is_layered or not v.aval.shape for v, is_layered in pairs)
    if name in _ALONG:
        along = params[_ALONG[name]]
        return 0 not in (along if isinstance(along, tuple) else (along,))
    if name == "broadcast_in_dim":
        # (L, ...) stays in front; what is the same for all layers is repeated.
        return (0 in params["broadcast_dimensions"][:1]) == layered[0]
    if name == "reshape":
        return layered[0] and params["dimensions"] is None
    if name == "transpose":
        return params["permutation"][0] == 0
    return False


def _same(eqn: Any, cut: Any) -> bool:
    """Whether two equations have the same constants (a mean's divisor, say)."""
    for ours, theirs in zip(eqn.invars, cut.invars, strict=True):
        literals = [isinstance(atom, core.Literal) for atom in (ours, theirs)]
        if any(literals):
            if not all(literals) or not np.array_equal(ours.val, theirs.val):
                return False
    return all(
        value == cut.params[key]
        for key, value in eqn.params.items()
        if key not in _SIZES
    )
