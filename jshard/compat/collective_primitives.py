"""What JAX calls collectives in a jaxpr, and where it writes who takes part.

The names of primitives and of their parameters, tried on JAX 0.10.2, 0.11.2 and
0.12.0.1. A collective under a new name would not be counted in the start-up note, and
would have no place in the one order that CPUs need: they could hang.
"""

from typing import Any

SUMS = {"pmax", "pmin", "psum", "psum_invariant"}
COLLECTIVES = SUMS | {
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
    "reduce_scatter",
}


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """The mesh axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


def groups_of(eqn: Any) -> list[list[int]] | None:
    """The groups of devices along the axis, where it does not span all of it."""
    return eqn.params.get("axis_index_groups")
