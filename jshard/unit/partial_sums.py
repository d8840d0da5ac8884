"""Checks that what "tensor" adds up over devices are sums over split features.

Within ``tensor_parallel`` each device computes with its columns, and rows of the next
product sum over these: partial sums, which are added up over devices at the end. If a
model adds anything to them before (a residual, or a bias that all devices have), the
result counts it once for each device; if it puts them through a nonlinear function, the
result is wrong in another way. Shapes fit in both cases. So each layer's program is
read: weights are told from activations, and those apart that hold partial sums.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from jax.extend import core

from jshard.compat.collective_primitives import axes_of
from jshard.compat.jaxprs import CALLS, inner_jaxpr, line_of, scan_body, scan_sizes
from jshard.errors import UserError
from jshard.fsdp.mesh import TENSOR
from jshard.layout.placement import Placement

# What an array is on the devices of "tensor".
ZERO = "zero"
WHOLE = "whole"  # computed without split weights
WEIGHT = "weight"  # a split weight, whatever its shape or dtype
FEATURES = "features"  # this device's heads, or hidden features
PARTIAL = "partial"  # a sum over this device's features

# Plain random streams draw other numbers on each device.
_RANDOM = {"random_bits", "rng_bit_generator", "threefry2x32"}
_PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
# Linear in an operand, and the same for each element or a matter of places.
_MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "cumsum",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "name",
    "neg",
    "pad",
    "pcast",
    "pvary",
    "reduce_precision",
    "reduce_sum",
    "reshape",
    "rev",
    "scatter-add",
    "scatter_add",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
    "all_to_all",
    "optimization_barrier",
}


def check_partial_sums(jaxpr: core.Jaxpr, places: Sequence[Placement]) -> None:
    """Raises UserError if partial sums are changed before they are added up.

    Args:
      jaxpr: a unit's, whose first inputs are its full weights.
      places: the placements of these.
    """
    axes = {axis for place in places for _, axis in place.splits}
    if TENSOR not in axes and not any(place.on_first for place in places):
        return
    kinds = [_kind(place) for place in places]
    kinds += [WHOLE] * (len(jaxpr.invars) - len(kinds))
    _kinds_after(jaxpr, kinds)


def _kind(place: Placement) -> str:
    if place.whole:
        return WHOLE
    if place.on_first == TENSOR:
        return PARTIAL
    return WEIGHT if any(axis == TENSOR for _, axis in place.splits) else WHOLE


def _kinds_after(jaxpr: core.Jaxpr, kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of a jaxpr's outputs, given those of its inputs."""
    env: dict[Any, str] = dict(zip(jaxpr.invars, kinds, strict=True))

    def kind(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            is_zero = getattr(atom.val, "shape", ()) == () and atom.val == 0
            return ZERO if is_zero else WHOLE
        return env.get(atom, WHOLE)  # constants

    for eqn in jaxpr.eqns:
        env.update(
            zip(eqn.outvars, _results(eqn, list(map(kind, eqn.invars))), strict=True)
        )
    return list(map(kind, jaxpr.outvars))


def _results(eqn: Any, kinds: list[str]) -> list[str]:
    """Returns the kinds of an equation's results."""
    name, results = eqn.primitive.name, len(eqn.outvars)
    if name in CALLS:
        return _kinds_after(inner_jaxpr(eqn).jaxpr, kinds)
    if name == "scan":
        return _after_loop(eqn, scan_body(eqn), *scan_sizes(eqn), kinds)
    if name == "while":
        kinds = kinds[eqn.params["cond_nconsts"] :]
        body, consts = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
        return _after_loop(eqn, body, consts, results, kinds)
    if name == "cond":
        branches = [_kinds_after(b.jaxpr, kinds[1:]) for b in eqn.params["branches"]]
        return [_both(eqn, set(of)) for of in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return kinds
    if name in _RANDOM or (name == "axis_index" and TENSOR in axes_of(eqn)):
        return [FEATURES] * results  # what is chosen by it differs, like features
    over_tensor = name in ("all_gather", "reduce_scatter", "psum", "psum_invariant")
    if over_tensor and TENSOR in axes_of(eqn):
        if name == "reduce_scatter" and kinds != [PARTIAL]:
            _refuse(eqn, "what is added up over devices is no sum over split features")
        return [WHOLE] * results
    return [_result(eqn, kinds)] * results


def _result(eqn: Any, kinds: list[str]) -> str:
    name = eqn.primitive.name
    if name in _PRODUCTS:  # not the sizes of a grouped product's groups
        kinds = kinds[:2]
    found = set(kinds)
    if name in _PRODUCTS and found == {WEIGHT, FEATURES}:
        return PARTIAL
    if PARTIAL not in found:
        if found <= {ZERO}:
            return ZERO if name in _MOVES else WHOLE
        if FEATURES in found or (WEIGHT in found and name in _PRODUCTS):
            return FEATURES
        if found == {WEIGHT}:
            return WEIGHT
        if WEIGHT in found:
            return WEIGHT if name in _MOVES | {"mul", "div"} else FEATURES
        return WHOLE
    if name == "select_n" and kinds[0] == FEATURES:
        _refuse(eqn, "sums over split features are dropped on some devices alone")
    if name in ("add", "add_any", "sub", "concatenate", "select_n", "pad"):
        return _both(eqn, set(kinds[1:] if name == "select_n" else kinds))
    if name in _MOVES:
        return PARTIAL
    others = list(kinds)
    others.remove(PARTIAL)
    scales = name == "mul" or (name == "div" and kinds[0] == PARTIAL)
    if (scales or name in _PRODUCTS) and set(others) <= {WHOLE, ZERO}:
        return PARTIAL
    _refuse(eqn, f"{name!r} is not linear in sums over split features")


def _both(eqn: Any, found: set[str]) -> str:
    """Returns the kind of a sum, or a choice, of values of these kinds."""
    if PARTIAL in found and found - {PARTIAL, ZERO}:
        _refuse(
            eqn,
            f"{eqn.primitive.name!r} puts what all devices have beside sums over split "
            "features, so the result would count it once for each device",
        )
    if PARTIAL in found:
        return PARTIAL
    return max(found, key=[ZERO, WHOLE, WEIGHT, FEATURES].index)


def _after_loop(
    eqn: Any, body: core.Jaxpr, consts: int, carried: int, kinds: list[str]
) -> list[str]:
    carry = kinds[consts:][:carried]
    while True:  # kinds only rise
        inputs = [*kinds[:consts], *carry, *kinds[consts + carried :]]
        results = _kinds_after(body, inputs)
        pairs = zip(carry, results[:carried], strict=True)
        after = [_both(eqn, {before, now}) for before, now in pairs]
        if after == carry:
            return [*carry, *results[carried:]]
        carry = after


def _refuse(eqn: Any, what: str) -> NoReturn:
    raise UserError(
        f"mesh: tensor: {what} ({line_of(eqn)}); within tensor_parallel, end with the "
        "product of split rows, and do the rest behind it"
    )
