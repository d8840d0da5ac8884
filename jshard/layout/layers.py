"""Which dimensions of a variable count layers, marked in its metadata."""

from typing import Any

from flax import nnx

LAYER_DIMS = "layer_dims"  # metadata of a Stack's variables: leading layer dimensions
IN_LAYER = "in_layer"  # metadata of the same: its path in a layer of each Stack


def layer_dims(variable: nnx.Variable) -> int:
    """How many leading dimensions of ``variable`` count layers of a Stack."""
    return variable.get_metadata(LAYER_DIMS, 0)


def mark_layers(variable: nnx.Variable, path: tuple[Any, ...]) -> None:
    """Marks a variable of a new Stack, whose first dimension now counts its layers.

    Args:
      variable: changed in place.
      path: of the variable in a layer.
    """
    inner = variable.get_metadata(IN_LAYER, ())
    variable.set_metadata(IN_LAYER, (tuple(map(str, path)), *inner))
    variable.set_metadata(LAYER_DIMS, layer_dims(variable) + 1)


def mark_stacked(variable: nnx.Variable, number: int, path: tuple[str, ...]) -> None:
    """Marks dimensions that count layers inside of those marked already.

    Args:
      variable: changed in place.
      number: of dimensions.
      path: of the variable in a layer.
    """
    outer = variable.get_metadata(IN_LAYER, ())
    variable.set_metadata(IN_LAYER, (*outer, *[path] * number))
    variable.set_metadata(LAYER_DIMS, layer_dims(variable) + number)


def without_layers(variable: nnx.Variable) -> nnx.Variable:
    """One layer's variable of a Stack's, with one layer dimension less."""
    inner = variable.get_metadata(IN_LAYER, ())[1:]
    return variable.copy(**{LAYER_DIMS: layer_dims(variable) - 1, IN_LAYER: inner})


def stack_of(path: tuple[Any, ...], variable: nnx.Variable) -> tuple[str, ...] | None:
    """The path of the outermost Stack that holds a variable; None outside Stacks.

    Args:
      path: of the variable in the model. Where it is not its Stack's (an alias), the
        variable counts as a Stack of its own.
      variable: with the metadata of ``mark_layers``.
    """
    if not layer_dims(variable):
        return None
    names = tuple(map(str, path))
    (in_layer, *_) = variable.get_metadata(IN_LAYER, (names,))
    own = len(names) - len(in_layer)
    return names[:own] if names[own:] == in_layer else names
