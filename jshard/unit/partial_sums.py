"""Checks that what "tensor" adds up over devices are sums over split features.

Within ``tensor_parallel`` the product with split rows leaves a device a partial sum,
over its own features. What a model adds to it before these are added up (a residual, a
bias) counts once a device, and a nonlinear function of it is wrong, though shapes fit.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jshard.compat.collective_primitives import axes_of
from jshard.compat.jaxprs import CALLS, line_of
from jshard.errors import UserError
from jshard.fsdp.mesh import TENSOR
from jshard.fsdp.precision import is_float
from jshard.layout.placement import Placement
from jshard.unit.dataflow import dependencies, through, union

# Kinds of arrays; zeros, and integers that all devices have alike, have none (0).
WHOLE = 1  # computed without split weights
WEIGHT = 2  # split, whatever its shape or dtype
FEATURES = 4  # this device's heads or hidden features, or its random numbers
PARTIAL = 8  # a sum over this device's features
# What primitives are: linear in all operands together, or in one of them, or in none.
_SUMS = set(
    "add add_any all_gather all_to_all broadcast_in_dim concatenate copy copy_p cumsum "
    "convert_element_type dynamic_slice dynamic_update_slice expand_dims gather neg "
    "name pad pcast ppermute psum psum_invariant pvary reduce_precision rev "
    "reduce_scatter reduce_sum reshape scatter scatter-add select_n slice split "
    "squeeze stop_gradient sub transpose".split()
)
_PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"}
_SCALES = {*_PRODUCTS, "div", "mul"}
_NONLINEAR = set(
    "abs clamp cos cosh cummax eq erf erfc exp exp2 expm1 floor ge gt integer_pow le "
    "lt log log1p logistic max min ne pow reduce_max reduce_min round rsqrt sign sin "
    "sort sqrt square tan tanh top_k".split()
)
_RANDOM = {"random_bits", "rng_bit_generator", "threefry2x32"}
_CALLS = {*CALLS, "checkpoint", "cond", "scan", "while"}


def check_partial_sums(jaxpr: core.Jaxpr, places: Sequence[Placement]) -> None:
    """Raises UserError for changed partial sums; warns of what no table knows.

    ``places`` are the placements of the first inputs, a unit's full weights.
    """
    kinds = [_kind(place, {axis for _, axis in place.splits}) for place in places]
    kinds += [WHOLE if is_float(x.aval) else 0 for x in jaxpr.invars[len(kinds) :]]
    if max(kinds, default=0) > WHOLE:
        dependencies(jaxpr, kinds, _results, [WHOLE] * len(jaxpr.constvars))


def _kind(place: Placement, axes: set[str]) -> int:
    if place.whole or not {TENSOR} & {*axes, place.on_rank_zero}:
        return WHOLE
    return WEIGHT if TENSOR in axes else PARTIAL


def _results(eqn: Any, entering: list[int]) -> list[int] | None:
    """The rule of ``dependencies``: the kinds of an equation's results."""
    name, kinds = eqn.primitive.name, list(entering)
    for i, x in enumerate(eqn.invars):
        if isinstance(x, core.Literal) and is_float(x.aval) and x.val != 0:
            kinds[i] = WHOLE
    if name in _CALLS:  # None: they are analysed inside
        return None if kinds == entering else through(eqn, kinds, _results)
    if name == "optimization_barrier":
        return kinds
    return [_result(eqn, name, kinds, union(kinds), x.aval) for x in eqn.outvars]


def _result(eqn: Any, name: str, kinds: list[int], found: int, aval: Any) -> int:
    over_tensor = TENSOR in axes_of(eqn)
    if name in _RANDOM or (over_tensor and name == "axis_index"):
        return FEATURES
    if over_tensor and name == "reduce_scatter" and found & ~PARTIAL:
        raise _error("what is added up over devices is no sum over split features", eqn)
    if over_tensor and name != "all_to_all":
        return WHOLE
    if found & PARTIAL:
        return _of_partial_sums(eqn, name, kinds)
    if found > WHOLE and name in _PRODUCTS:
        return PARTIAL if found == WEIGHT | FEATURES else FEATURES
    if found > WHOLE:
        return WEIGHT if found < FEATURES and name in _SUMS | _SCALES else FEATURES
    moved = name in _SUMS and name != "convert_element_type"
    return WHOLE if is_float(aval) and (found or not moved) else 0


def _of_partial_sums(eqn: Any, name: str, kinds: list[int]) -> int:
    others = [kind for kind in kinds if kind != PARTIAL]
    scales = name in _SCALES and (name != "div" or kinds[0] == PARTIAL)
    one = scales and len(others) == len(kinds) - 1 and union(others) <= WHOLE
    if one or (name in _SUMS and not any(others)):
        return PARTIAL
    if name not in _SUMS | _SCALES | _NONLINEAR:
        what = f"mesh: tensor: is {name!r} linear in sums over split features?"
        how = "compare a step with one device's (jshard.testing.check_step)"
        warnings.warn(f"{what} ({line_of(eqn)}); {how}", stacklevel=2)
        return 0
    what = f"{name!r} is not linear in sums over split features"
    if name == "select_n" and kinds[0]:
        what = "sums over split features are dropped on some devices alone"
    elif name in _SUMS:
        what = f"{name!r} puts what all devices have beside sums over split features"
    raise _error(what, eqn)


def _error(what: str, eqn: Any) -> UserError:
    how = "within tensor_parallel, end with the product of split rows"
    return UserError(f"mesh: tensor: {what} ({line_of(eqn)}); {how}")
