"""Refuses what makes a sum over "tensor" wrong: see ``tensor_parallel``.

A product of split rows gives each device a partial sum, which is added up only at the
end. What is not linear in it, or added to it on all devices, would be wrong in silence.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.mesh import TENSOR
from jshard.sharding.settings.precision import is_float
from jshard.system.compat import jaxprs
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies, through, union
from jshard.system.errors import UserError, warn

# Kinds of arrays: computed without split weights; a split weight; a device's features
# or random numbers; sums over these. Zeros, and integers that all have alike, are 0.
WHOLE, WEIGHT, FEATURES, PARTIAL = 1, 2, 4, 8
# What primitives are: linear in all operands together, or in one of them, or in none.
_SUMS = set(
    "add add_any all_gather all_to_all broadcast_in_dim concatenate copy copy_p cumsum "
    "convert_element_type dynamic_slice dynamic_update_slice expand_dims gather neg "
    "name pad pcast ppermute psum psum_invariant pvary reduce_precision rev "
    "reduce_scatter reduce_sum reshape scatter scatter-add select_n slice split "
    "scatter_add squeeze stop_gradient sub transpose".split()
)
_PRODUCTS = set(
    "block_scaled_dot conv_general_dilated dot_general ragged_dot "
    "ragged_dot_general".split()
)
_SCALES = {*_PRODUCTS, "div", "mul"}
_NONLINEAR = set(
    "abs clamp cos eq erf exp expm1 ge gt integer_pow le log log1p logistic lt max "
    "min ne pow reduce_max reduce_min round rsqrt sign sin sort sqrt tanh".split()
)
_RANDOM = {"random_bits", "rng_bit_generator", "threefry2x32"}
_CALLS = {*jaxprs.CALLS, "checkpoint", "cond", "scan", "while"}


def check_partial_sums(jaxpr: core.Jaxpr, places: Sequence[Placement]) -> None:
    """Raises UserError for a changed sum; ``places`` are of the first inputs."""
    kinds = [WHOLE if is_float(x.aval) else 0 for x in jaxpr.invars]
    for i, place in enumerate(places):
        split = any(axis == TENSOR for _, axis in place.part.splits)
        if not place.part.whole and (split or place.part.on_rank_zero == TENSOR):
            kinds[i] = WEIGHT if split else PARTIAL
    if max(kinds, default=0) > WHOLE:
        dependencies(jaxpr, kinds, _results, [WHOLE] * len(jaxpr.constvars))


def _results(eqn: Any, entering: list[int]) -> list[int] | None:
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
    over_tensor = TENSOR in jaxprs.axes_of(eqn) and name != "all_to_all"
    if name in _RANDOM or (over_tensor and name == "axis_index"):
        return FEATURES
    if over_tensor and (name != "reduce_scatter" or not found & ~PARTIAL):
        return WHOLE
    if over_tensor or found & PARTIAL:
        return _of_partial_sums(eqn, name, kinds, over_tensor)
    if found > WHOLE and name in _PRODUCTS:
        return PARTIAL if found == WEIGHT | FEATURES else FEATURES
    if found > WHOLE:
        return WEIGHT if found < FEATURES and name in _SUMS | _SCALES else FEATURES
    moved = name in _SUMS and name != "convert_element_type"
    return WHOLE if is_float(aval) and (found or not moved) else 0


def _of_partial_sums(eqn: Any, name: str, kinds: list[int], over_tensor: bool) -> int:
    others = [kind for kind in kinds if kind != PARTIAL]
    scales = name in _SCALES and (name != "div" or kinds[0] == PARTIAL)
    scales &= len(others) == len(kinds) - 1 and union(others) <= WHOLE
    if scales or (name in _SUMS and not any(others)):
        return PARTIAL
    how = "within tensor_parallel, end with the product of split rows"
    what = f"{name!r} is not linear in sums over split features"
    if over_tensor:
        what = "what is added up over devices is no sum over split features"
    elif name == "select_n" and kinds[0]:
        what = "sums over split features are dropped on some devices alone"
    elif name in _SUMS:
        what = f"{name!r} puts what all devices have beside sums over split features"
    elif name not in _SCALES | _NONLINEAR:
        what = f"is {name!r} linear in sums over split features?"
        how = "compare a step with one device's (jshard.testing.check_step)"
        warn(f"mesh: tensor: {what} ({lines.line_of(eqn)}); {how}")
        return 0
    raise UserError(f"mesh: tensor: {what} ({lines.line_of(eqn)}); {how}")
