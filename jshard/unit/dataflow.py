"""Dataflow analysis: the inputs of a jaxpr that each output depends on."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from jshard.compat import jaxprs

# rule(eqn, bits of the inputs) -> bits of the outputs, or None for those that follow
# from the equation's inner jaxpr or, without one, from all of its inputs.
Rule = Callable[[Any, list[int]], list[int] | None]


def dependencies(
    jaxpr: Any,
    inputs: Sequence[int],
    rule: Rule = lambda eqn, entering: None,
    consts: Sequence[int] = (),
) -> list[int]:
    """Returns the union of the bits of the inputs that each output depends on.

    Calls and branches are analysed inside, and loops up to a fixed point; what a branch
    or a loop returns depends on its condition, too. Each output of any other equation
    with an inner jaxpr depends on all inputs of that equation. ``rule`` says what holds
    for some equations instead. Constants have the bits 0 by default.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= zip(jaxpr.constvars, consts, strict=False)

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        out = through(eqn, list(map(read, eqn.invars)), rule)
        env.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def union(bits: Sequence[int]) -> int:
    """Returns all bits that are in any of ``bits``."""
    return functools.reduce(operator.or_, bits, 0)


def through(eqn: Any, entering: list[int], rule: Rule) -> list[int]:
    """Returns the bits of an equation's outputs, given those of its inputs."""
    if (out := rule(eqn, entering)) is not None:
        return out
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, entering, rule)
    if name == "while":
        return loop(eqn, entering, rule)[1]
    if name == "cond":
        index, *others = entering
        branches = [dependencies(b.jaxpr, others, rule) for b in eqn.params["branches"]]
        return [index | union(bits) for bits in zip(*branches, strict=True)]
    if (inner := jaxprs.open_inner(eqn)) is not None:
        return dependencies(inner, entering, rule)
    return [union(entering)] * len(eqn.outvars)


def _scan(eqn: Any, entering: list[int], rule: Rule) -> list[int]:
    body, (num_consts, num_carry) = jaxprs.scan_body(eqn), jaxprs.scan_sizes(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    while True:
        out = dependencies(body, entering, rule)
        merged = [a | b for a, b in zip(entering[carry], out[:num_carry], strict=True)]
        if merged == entering[carry]:
            return out
        entering = [*entering[:num_consts], *merged, *entering[carry.stop :]]


def loop(eqn: Any, entering: list[int], rule: Rule) -> tuple[int, list[int]]:
    """Returns the bits of a ``while`` loop's condition, and of its results."""
    goes_on, body, num_goes_on, num_body = jaxprs.while_parts(eqn)
    of_goes_on, rest = entering[:num_goes_on], entering[num_goes_on:]
    of_body, carry = rest[:num_body], rest[num_body:]
    while True:
        (condition,) = dependencies(goes_on.jaxpr, [*of_goes_on, *carry], rule)
        out = dependencies(body.jaxpr, [*of_body, *carry], rule)
        merged = [a | b | condition for a, b in zip(carry, out, strict=True)]
        if merged == carry:
            return condition, carry
        carry = merged
<<<<<<< HEAD


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
_CALLS = {*CALLS, "checkpoint", "cond", "scan", "while"}


def check_partial_sums(jaxpr: core.Jaxpr, places: Sequence[Placement]) -> None:
    """Raises UserError for a changed sum; ``places`` are of the first inputs."""
    kinds = [WHOLE if is_float(x.aval) else 0 for x in jaxpr.invars]
    for i, place in enumerate(places):
        split = any(axis == TENSOR for _, axis in place.splits)
        if not place.whole and (split or place.on_rank_zero == TENSOR):
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
    over_tensor = TENSOR in axes_of(eqn) and name != "all_to_all"
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
        warnings.warn(f"mesh: tensor: {what} ({line_of(eqn)}); {how}", stacklevel=2)
        return 0
    raise UserError(f"mesh: tensor: {what} ({line_of(eqn)}); {how}")
=======
>>>>>>> main
