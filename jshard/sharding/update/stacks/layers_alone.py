"""Asks an optimizer whether one layer of a Stack can be updated without all others.

Two things must hold, why is in docs/decisions/optimizers.md. By dataflow: what is
computed of a Stack's arrays needs no others, but counts and rates. By values: one layer
of an array, (1, ...), is updated as it is among all, (L, ...).
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jshard.sharding.layout.padding import exact_types
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.call_optax import plain
from jshard.sharding.update.per_layer import asking
from jshard.sharding.update.stacks.tiny_trees import (
    Transformation,
    calls,
    choices,
    same,
    tiny,
    traced,
    updated,
)
from jshard.sharding.update.streamed_update import homes_of
from jshard.system.compat.jaxprs import consts_as_inputs, needed_for
from jshard.system.errors import UserError

Home = str | None  # a Stack, or a parameter outside of Stacks; None is shared


def streams(tx: Transformation, params: Any) -> tuple[str | None, bool]:
    """Returns why layers cannot be updated alone, or None; and whether the rest can.

    The rest are parameters outside of Stacks, each alone.
    """
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    types = plain(exact_types(types))
    stacks, _ = homes_of(types, types)
    needs = _needs(tx, types)
    for made, of in sorted(needs, key=str):
        if made in stacks or of in stacks:
            what = f"the update of {made}" if made else "what it keeps for all"
            return f"{what} depends on {of}", False
    with within(asking, True):
        return _not_alone(tx, types, stacks), not needs


def _needs(tx: Transformation, params: Any) -> set[tuple[Home, Home]]:
    """Returns (home of a result, home of another's array that it is computed from)."""
    closed, inputs, outputs = traced(tx, params)
    leaves = jax.tree.leaves(inputs)
    jaxpr = consts_as_inputs(closed, leaves, closed.consts)
    of_inputs, of_outputs = (homes_of(params, x)[1] for x in (inputs, outputs))
    found = set()
    for home in set(of_outputs):
        wanted = [other == home for other in of_outputs]
        _, used = needed_for(jaxpr, wanted, effects=False)
        read = {of for of, uses in zip(of_inputs, used, strict=False) if uses}
        found |= {(home, of) for of in read - {home, None}}
    return found


def _not_alone(tx: Transformation, params: Any, stacks: set[str]) -> str | None:
    """Returns what is updated otherwise in one layer than among all, or None."""
    lengths = {home: x.shape[:1] for home, x in _with_homes(params, params)}
    for home, x in _with_homes(params, traced(tx, params)[1][1]):
        if home in stacks and x.shape[:1] != lengths[home]:
            return f"its state has one array of {list(x.shape)} for all of {home}"

    def layer(tree: Any, index: int) -> Any:
        """Returns a tree with one layer of each Stack, (1, ...)."""
        leaves = [
            _one_layer(x, index) if home in stacks else x
            for home, x in _with_homes(params, tree)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    try:
        if choices(tx, params) != choices(tx, layer(params, 0)):
            return "a mask or label chooses otherwise for one layer than for all"
        for args, results in _trials(tx, tiny(params, None), stacks):
            grads, state, here, value = args
            for index in (0, -1):
                trees = (layer(x, index) for x in (grads, state, here))
                got = updated(tx, *trees, value=value)
                want = jax.tree.leaves(layer(results, index))
                if not all(map(same, jax.tree.leaves(got), want)):
                    return "a layer alone is updated otherwise than among all"
    except UserError:  # it says what no step has, whatever the arrays
        raise
    except Exception as error:  # the user's: it may look for what one layer has not
        return f"it raises {type(error).__name__} for one layer alone"
    return None


def _trials(tx: Transformation, params: Any, stacks: set[str]) -> Iterator[tuple]:
    """Yields calls, and one in which the first layers' gradients are not numbers.

    These reach other layers through a norm, whatever is clipped to.
    """
    grads, others = params, []
    for args, results in calls(tx, params):
        yield args, results
        grads, *others = args
    leaves = [x.copy() for x in jax.tree.leaves(grads)]
    for (home, _), x in zip(_with_homes(params, grads), leaves, strict=True):
        if home in stacks:
            x[0] = np.nan
    grads = jax.tree.unflatten(jax.tree.structure(grads), leaves)
    yield (grads, *others), updated(tx, grads, *others)


def _with_homes(params: Any, tree: Any) -> list[tuple[Home, Any]]:
    return list(zip(homes_of(params, tree)[1], jax.tree.leaves(tree), strict=True))


def _one_layer(x: Any, index: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    return np.asarray(x)[index : index + 1 or None]
