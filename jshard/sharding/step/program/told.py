"""What a step's program does with weights that a user should know, as warnings."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from jshard.sharding.collectives.shards import READ
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.variables import variables
from jshard.sharding.settings.scopes import ALL_GATHER
from jshard.system.compat import jaxprs
from jshard.system.compat.programs.dataflow import dependencies, union
from jshard.system.errors import some_of, warn

# Primitives that give a parameter its place, shape or dtype, and no other value.
_KEEPS = {
    "convert_element_type",
    "copy",
    "device_put",
    "reshape",
    "sharding_constraint",
    "squeeze",
}


def tell_of_reads(reads: list[tuple[str, str]], program: core.ClosedJaxpr) -> None:
    """Warns once of the weights that a program reads outside of their units.

    What it does not need is no read: that of a shape, or of a module that is printed.
    """
    if not reads:
        return
    needed = jaxprs.nested(jaxprs.without_unused(program).jaxpr.eqns)
    scopes = "\n".join({jaxprs.scopes_of(eqn) for eqn in needed})
    found = [read for i, read in enumerate(reads) if READ.format(i) in scopes]
    names = dict(reversed(found))  # with their first lines
    if not names:
        return
    (name, line), *more = reversed(names.items())
    others = some_of([repr(name) for name, _ in more], limit=3)
    others = f"; so are {len(more)} more: {others}" if more else ""
    warn(
        f"parameter {name!r} is read outside of its unit, or handed to a transform "
        f"({line}): it is gathered there, whole, each time; to gather once, read it "
        f"from jshard.gathered(unit){others}"
    )


def written(
    model: nnx.Module, given: dict[tuple, Any], arrays: Sequence[nnx.State]
) -> dict[int, jax.Array]:
    """Returns the parameters that a forward has set, by their place in ``arrays``.

    ``given`` are the raw values that they had, by path. Transforms of Flax set all
    parameters of what they are given.
    """
    after = {path: v.get_raw_value() for path, v in variables(model)}
    places = {path: i for i, path in enumerate(_paths(arrays))}
    return {
        places[path]: x
        for path, x in after.items()
        if path in places and isinstance(x, jax.Array) and x is not given.get(path)
    }


def say_what_is_written(
    traced: Any, shapes: Any, layout: Layout, arrays: Sequence[nnx.State]
) -> tuple[Any, Any]:
    """Warns of parameters that end a forward changed, and takes them from its results.

    They are the last of these, from ``written``.
    """
    *shapes, of_written = shapes
    if not of_written:
        return traced, tuple(shapes)
    paths = _paths(arrays)
    computed, other = 1 << len(paths), 2 << len(paths)

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return entering
        loops = "cond", "scan", "while"
        if name in loops or name in jaxprs.CALLS or jaxprs.open_inner(eqn) is not None:
            return None
        as_it_is = name in _KEEPS or ALL_GATHER in jaxprs.scopes_of(eqn)
        return [union(entering) | (0 if as_it_is else computed)] * len(eqn.outvars)

    bits = [1 << i for i in range(len(paths))]
    bits += [other] * (len(traced.jaxpr.invars) - len(paths))
    number = len(traced.jaxpr.outvars) - len(of_written)
    found = dependencies(traced.jaxpr, bits, rule)[number:]
    names = []
    for i, value in zip(sorted(of_written), found, strict=True):
        place = layout.places[paths[i]]
        if place.weight.four_bit or place.weight.float8:  # read, they are computed
            value &= ~computed
        if value != 1 << i:
            names.append(repr(".".join(map(str, paths[i]))))
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        warn(
            f"loss_fn changes parameter {names[0]}{more} until the step's end: the "
            "optimizer goes on from the old value; to keep the new one, make it a "
            "Variable that is not an nnx.Param, or change the state between steps "
            "(docs: A teacher beside a student)"
        )
    wanted = [i < number for i in range(len(traced.jaxpr.outvars))]
    return jaxprs.without_unused(traced, wanted), tuple(shapes)


def _paths(arrays: Sequence[nnx.State]) -> list[tuple]:
    return [path for part in arrays[:2] for path, _ in nnx.to_flat_state(part)]
