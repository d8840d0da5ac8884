"""Checks that what "tensor" adds up over devices are sums over split features.

Within ``tensor_parallel`` the product with split rows leaves each device a partial sum,
over its own features. What a model adds to it before these are added up over devices (a
residual, a bias) counts once for each device, and a nonlinear function of it is wrong,
too, though all shapes fit. The tables say what primitives make of the kinds of arrays.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jshard.compat.collective_primitives import axes_of
from jshard.compat.jaxprs import CALLS, line_of
from jshard.errors import UserError
from jshard.layout.placement import Placement
from jshard.mesh import TENSOR
from jshard.precision import is_float
from jshard.unit.dataflow import dependencies, through, union

# Kinds of arrays; zeros, and integers that all devices have alike, have none (0).
WHOLE = 1  # computed without split weights
WEIGHT = 2  # split, whatever its shape or dtype
FEATURES = 4  # this device's heads or hidden features, or its random numbers
PARTIAL = 8  # a sum over this device's features

_CALLS = {*CALLS, "checkpoint", "cond", "scan", "while"}
_RANDOM = {"random_bits", "rng_bit_generator", "threefry2x32"}
_PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"}
_SCALES = {*_PRODUCTS, "div", "mul"}  # linear in one operand
_SUMS = set(  # linear in all operands together
    "add add_any all_gather all_to_all broadcast_in_dim concatenate copy copy_p cumsum "
    "convert_element_type dynamic_slice dynamic_update_slice expand_dims gather name neg "
    "pad pcast ppermute psum psum_invariant pvary reduce_precision reduce_scatter "
    "reduce_sum reshape rev scatter scatter-add select_n slice split squeeze "
    "stop_gradient sub transpose".split()
)
_NONLINEAR = set(
    "abs acos acosh argmax argmin asin asinh atan atan2 atanh cbrt ceil clamp cos cosh "
    "cumlogsumexp cummax cummin cumprod eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min ne pow reduce_max reduce_min "
    "reduce_prod rem round rsqrt sign sin sinh sort sqrt square tan tanh top_k".split()
)
_WRONG = "mesh: tensor: {} ({}); within tensor_parallel, {}"
_END = "end with the product of split rows, and do the rest behind it"
_CHECK = "compare a step with one device's, by jshard.testing.check_step"


def check_partial_sums(jaxpr: core.Jaxpr, places: Sequence[Placement]) -> None:
    """Raises UserError if partial sums are changed before they are added up.

    Warns of what the tables do not know. ``places`` are the placements of the jaxpr's
    first inputs, a unit's full weights.
    """
    kinds = list(map(_kind, places))
    if set(kinds) <= {WHOLE}:
        return
    kinds += [WHOLE if is_float(x.aval) else 0 for x in jaxpr.invars[len(kinds) :]]
    dependencies(jaxpr, kinds, _results, [WHOLE] * len(jaxpr.constvars))


def _kind(place: Placement) -> int:
    if place.on_first == TENSOR and not place.whole:
        return PARTIAL
    split = any(axis == TENSOR for _, axis in place.splits)
    return WEIGHT if split and not place.whole else WHOLE


def _results(eqn: Any, entering: list[int]) -> list[int] | None:
    """The rule of ``dependencies``: the kinds of an equation's results."""
    name, kinds = eqn.primitive.name, list(entering)
    for i, x in enumerate(eqn.invars):
        if isinstance(x, core.Literal) and is_float(x.aval) and x.val != 0:
            kinds[i] = WHOLE
    if name in _CALLS:  # analysed inside
        return None if kinds == entering else through(eqn, kinds, _results)
    if name == "optimization_barrier":
        return kinds
    return [_result(eqn, name, kinds)] * len(eqn.outvars)


def _result(eqn: Any, name: str, kinds: list[int]) -> int:
    found, over_tensor = union(kinds), TENSOR in axes_of(eqn) and name != "all_to_all"
    if name in _RANDOM or (over_tensor and name == "axis_index"):
        return FEATURES
    if over_tensor and name == "reduce_scatter" and found & ~PARTIAL:
        what = "what is added up over devices is no sum over split features"
        raise UserError(_WRONG.format(what, line_of(eqn), _END))
    if over_tensor:
        return WHOLE
    if found & PARTIAL:
        return _of_partial_sums(eqn, name, kinds)
    if name in _PRODUCTS and found > WHOLE:
        return PARTIAL if found == WEIGHT | FEATURES else FEATURES
    if found > WHOLE:
        return WEIGHT if found < FEATURES and name in _SUMS | _SCALES else FEATURES
    floats = any(is_float(x.aval) for x in eqn.outvars)
    moved = name in _SUMS and name != "convert_element_type"
    return WHOLE if floats and (found or not moved) else 0


def _of_partial_sums(eqn: Any, name: str, kinds: list[int]) -> int:
    others = [kind for kind in kinds if kind != PARTIAL]
    if name in _SUMS and not any(others):
        return PARTIAL
    scaled = len(others) == len(kinds) - 1 and union(others) <= WHOLE
    if scaled and name in _SCALES and (name != "div" or kinds[0] == PARTIAL):
        return PARTIAL
    if name not in _SUMS | _SCALES | _NONLINEAR:
        what = f"whether {name!r} is linear in sums over split features is unknown"
        warnings.warn(_WRONG.format(what, line_of(eqn), _CHECK), stacklevel=2)
        return 0
    what = f"{name!r} is not linear in sums over split features"
    if name == "select_n" and kinds[0]:
        what = "sums over split features are dropped on some devices alone"
    elif name in _SUMS:
        what = f"{name!r} counts what is beside sums over split features once a device"
    raise UserError(_WRONG.format(what, line_of(eqn), _END))
