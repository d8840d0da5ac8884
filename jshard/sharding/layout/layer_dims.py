"""Metadata that marks which dimensions of a variable are layer dimensions."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

# Metadata key: the variable's path in a layer of each Stack that it is stacked by,
# outermost Stack first. The Stacks' layer dimensions lead its shape.
IN_LAYER = "in_layer"
# Metadata key: how many of these an FSDP marked, of what nnx.vmap stacked.
_STACKED = "stacked"


def layer_dims(variable: nnx.Variable) -> int:
    """Returns the number of leading layer dimensions of ``variable``."""
    return len(variable.get_metadata(IN_LAYER, ()))


def mark_layers(
    variable: nnx.Variable, *, outer: Sequence[tuple] = (), inner: Sequence[tuple] = ()
) -> None:
    """Marks the layer dimensions of further Stacks, in place.

    ``outer`` has the variable's path in a layer of each Stack around those that are
    marked already, ``inner`` the same for each Stack inside of these.
    """
    paths = (*outer, *variable.get_metadata(IN_LAYER, ()), *inner)
    variable.set_metadata(IN_LAYER, tuple(tuple(map(str, path)) for path in paths))


def mark_stacked_by_flax(variable: nnx.Variable, number: int, inner: tuple) -> None:
    """Marks ``number`` layer dimensions that ``nnx.vmap`` added, in place.

    Marks that are there already, as of a model of another state, are taken off before.
    """
    paths = variable.get_metadata(IN_LAYER, ())
    own = len(paths) - variable.get_metadata(_STACKED, 0)
    variable.set_metadata(IN_LAYER, paths[:own])
    mark_layers(variable, inner=[inner] * number)
    variable.set_metadata(_STACKED, number)


def layer_dims_of_stacks(variable: nnx.Variable) -> int:
    """Returns the number of layer dimensions but those that ``nnx.vmap`` added."""
    return layer_dims(variable) - variable.get_metadata(_STACKED, 0)


def without_layers(variable: nnx.Variable) -> nnx.Variable:
    """Returns a copy of a Stack's variable marked with one fewer layer dimension."""
    return variable.copy(**{IN_LAYER: variable.get_metadata(IN_LAYER, ())[1:]})


def stack_of(path: tuple[Any, ...], variable: nnx.Variable) -> tuple[str, ...] | None:
    """Returns the path of the outermost Stack of a variable, or None outside Stacks.

    If the variable's path does not end with the path in a layer (an alias, say), it
    counts as a Stack of its own.
    """
    if not layer_dims(variable):
        return None
    names = tuple(map(str, path))
    (in_layer, *_) = variable.get_metadata(IN_LAYER, (names,))
    own = len(names) - len(in_layer)
    return names[:own] if names[own:] == in_layer else names
