"""Examples and batches as trees of NumPy arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jshard.system.errors import UserError


def to_arrays(value: Any, path: str = "") -> Any:
    """Returns an example as a tree of arrays; a list is one array, a tuple a tree.

    Raises:
      UserError: Something in it is no number, or is ragged.
    """
    if isinstance(value, Mapping):
        return {key: to_arrays(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(to_arrays(item, f"{path}[{i}]") for i, item in enumerate(value))
    if hasattr(value, "detach"):  # a tensor of PyTorch
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UserError(
            f"make_data: example{path} is ragged and cannot be an array: {error}"
        ) from error
    except TypeError as error:  # bfloat16 of PyTorch, which NumPy does not have
        raise UserError(
            f"make_data: example{path} cannot be an array of NumPy: {error}"
        ) from error
    _check_numbers(array, path)
    return array


def _check_numbers(array: np.ndarray, path: str) -> None:
    if array.dtype.kind in "OSUmM":  # objects, bytes, strings, times
        found = "text" if array.dtype.kind in "SU" else f"of type {array.dtype}"
        raise UserError(
            f"make_data: example{path} is {found}, but examples hold only numbers; "
            "tokenize text, and leave out what the model does not use"
        )


def stack(examples: Sequence[Any]) -> Any:
    """Stacks examples to a batch.

    Raises:
      UserError: The examples differ in structure or shapes, or are not numbers.
    """
    structure = jax.tree.structure(examples[0])
    for example in examples:
        other = jax.tree.structure(example)
        if other != structure:
            raise UserError(
                f"make_data: examples differ in structure: {structure} and {other}"
            )

    def stack_leaves(path: Any, *leaves: Any) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        arrays = [np.asarray(leaf) for leaf in leaves]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            listed = ", ".join(map(str, shapes[:3])) + ", ..." * (len(shapes) > 3)
            raise UserError(
                f"make_data: example{name} has several shapes in one batch: {listed}; "
                "pad or cut examples to one shape"
            )
        batch = np.stack(arrays)
        _check_numbers(batch, name)
        return batch

    return jax.tree_util.tree_map_with_path(stack_leaves, *examples)


def count_rows(batch: Any) -> int:
    """Returns the number of examples of a batch.

    Raises:
      UserError: Its arrays differ in their leading dimension.
    """
    shapes = {
        jax.tree_util.keystr(path): np.shape(x)
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) != 1 or () in sizes:
        found = ", ".join(
            f"{name or 'array'} {shape}" for name, shape in shapes.items()
        )
        raise UserError(
            "data: every array needs the same leading dimension, the examples; got "
            f"{found or 'no arrays'}"
        )
    return sizes.pop()[0]


def count_items(batch: Any) -> tuple[str, int]:
    """Counts the tokens or examples of a batch, a pytree of arrays [batch, ...].

    Returns:
      `("tokens", n)` if the batch has integers of shape (batch, time), otherwise
      `("examples", n)`.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    for leaf in leaves:
        if leaf.ndim == 2 and np.issubdtype(leaf.dtype, np.integer):
            return "tokens", leaf.size
    return "examples", len(leaves[0])
