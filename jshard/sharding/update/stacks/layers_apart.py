"""Asks an optimizer whether a Stack's layers are tensors of their own to it.

A Stack keeps L tensors in one array, (L, ...). An optimizer must make of it what it
makes of these tensors in arrays of their own: the mask of all that has two dimensions
takes L biases for a matrix, and LAMB has one norm for L matrices. Values decide, those
of updates of a tiny model that has the parameters' paths and ranks.

In what form the tensors are apart depends on what the optimizer looks at, and one form
in which its updates are the same will do: all layers as in an ``nnx.List``; or one
layer of each Stack under its own path, for what chooses by exact paths; or, for what
has a norm of all gradients, too, a list of arrays in one variable. An optimizer that
treats equal layers unlike (a rate for each layer, or noise) knows of them, and is not
asked more. What chooses by size chooses otherwise in a tiny model, and must have the
same program for one layer as for all.

Most optimizers do the same with each element, in all layers and in one alone. Their
programs say so, and nothing is computed.
"""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.call_optax import plain
from jshard.sharding.update.per_layer import asking
from jshard.sharding.update.stacks.tiny_trees import (
    Form,
    Transformation,
    as_a_list,
    calls,
    choices,
    lists_of_arrays,
    one_layer,
    programs,
    same,
    tiny,
)
from jshard.system.errors import UserError, warn


def check_layers(tx: Transformation, params: nnx.State) -> None:
    """Raises UserError if ``tx`` takes the layers of a Stack for one tensor.

    Args:
      tx: any optax transformation.
      params: the parameters, abstract, of their exact shapes.
    """
    if not any(layer_dims(variable) for _, variable in nnx.to_flat_state(params)):
        return
    params = plain(params)
    with within(asking, True):
        if _alike_and_pointwise(tx, params):
            return
        problem = _not_apart(tx, params) or _chosen_by_size(tx, params)
    if problem:
        raise UserError(
            "optimizer: it does not treat a Stack's layers as tensors of their own: "
            f"{problem}; put what looks at ranks, sizes or whole tensors (a mask, say) "
            "in jshard.optim.per_layer, which gives it one layer's tensors (clip by a "
            "global norm outside of it), or let the mask look at paths"
        )


def _alike_and_pointwise(tx: Transformation, params: nnx.State) -> bool:
    """Whether all layers and one alone have the same program, of each element.

    Then nothing need be computed. Most optimizers are like that, but not those with a
    norm of what they take.
    """
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), np.float32), params
    )
    leaves, treedef = jax.tree.flatten(shaped)
    try:
        return _pointwise(tx, treedef, tuple(leaves))
    except UserError:  # it says what no step has, whatever the arrays
        raise
    except Exception:  # the user's: it is asked again, and said
        return False


@functools.lru_cache(maxsize=8)  # a state is shaped several times, of other shardings
def _pointwise(tx: Transformation, treedef: Any, leaves: tuple[Any, ...]) -> bool:
    params = jax.tree.unflatten(treedef, leaves)
    whole = programs(tx, params)
    return None not in whole and whole == programs(tx, one_layer(params))


def _not_apart(tx: Transformation, params: nnx.State) -> str | None:
    """Returns what is updated otherwise in a Stack than alone, or None."""
    whole, few, problems = tiny(params, None), tiny(params, 2), []
    for form, stacks in (
        (as_a_list, few),
        (one_layer, whole),
        (lists_of_arrays, few),
    ):
        try:
            path = _updated_otherwise(tx, stacks, form)
            problem = f"its update of {path} is not that of each layer alone"
        except UserError:  # it says what no step has, whatever the arrays
            raise
        except Exception as error:  # the user's: it may look for what a form has not
            path, problem = "", f"for a layer alone it raises {type(error).__name__}"
        if path is None or (not problems and _knows_layers(tx, whole)):
            return None
        problems.append(problem)
    return next((x for x in reversed(problems) if "raises" not in x), problems[-1])


def _updated_otherwise(tx: Transformation, stacks: Any, form: Form) -> str | None:
    """Returns the path of what updates of the two differ in, or None."""
    both = zip(calls(tx, stacks), calls(tx, form(stacks)), strict=True)
    for (_, (whole, _)), (_, (apart, _)) in both:
        # Both in one form: what is apart may have another order of leaves.
        named = jax.tree_util.tree_leaves_with_path(form(whole))
        for (path, x), y in zip(named, jax.tree.leaves(apart), strict=True):
            if not same(x, y):
                names = [str(key.key) for key in path if hasattr(key, "key")]
                return ".".join(names)
    return None


def _knows_layers(tx: Transformation, stacks: Any) -> bool:
    """Returns whether layers of equal values are updated unlike each other.

    An optimizer that takes no arrays of these sizes cannot be asked; a warning says so.
    """

    def first(variable: Any, like: Any) -> Any:
        value = variable.get_value()[(slice(0, 1),) * layer_dims(like)]
        return variable.copy(np.broadcast_to(value, like.get_value().shape).copy())

    firsts = lambda tree: jax.tree.map(first, tree, stacks, is_leaf=is_variable)
    try:
        for _, (updates, _) in calls(tx, firsts(stacks)):
            pairs = (jax.tree.leaves(x) for x in (updates, firsts(updates)))
            if not all(map(same, *pairs)):
                return True
    except Exception as error:  # the user's, raised again where a step has it, too
        warn(
            "optimizer: whether it treats a Stack's layers as tensors of their own is "
            f"not known: for tiny arrays it raises {type(error).__name__}: {error}"
        )
        return True
    return False


def _chosen_by_size(tx: Transformation, params: nnx.State) -> str | None:
    """Returns that an optimizer chooses otherwise for a layer's sizes, or None."""
    whole = choices(tx, params)
    if whole == _choices(tx, tiny(params, None)):
        return None  # so that the tiny arrays were treated as these are
    if whole == _choices(tx, one_layer(params)):
        return None
    return "it chooses by size, and otherwise for one layer's tensors than for all"


def _choices(tx: Transformation, params: Any) -> Any:
    try:
        return choices(tx, params)
    except Exception as error:  # the user's, for sizes or paths that no step has
        return f"raises {type(error).__name__}"
