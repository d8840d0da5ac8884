"""What a model declares to be split over "tensor" and "expert", and so not gathered.

A module says which of its submodules have their columns or rows split over "tensor"
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3) in an attribute
``tensor_split``, and which hold experts in ``expert_split``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jshard.errors import UserError, some_of
from jshard.layout.layers import layer_dims
from jshard.layout.variables import variables
from jshard.mesh import EXPERT, TENSOR

SPLITS = "splits"  # metadata key: (dimension from the end, axis) pairs of a parameter
ON_FIRST = "on_first"  # metadata key: see Placement.on_first


@dataclasses.dataclass(frozen=True)
class Split:
    """How the parameters of a module's submodules are split over "tensor".

    The module computes within ``jshard.tensor_parallel``: products with columns give
    each device some of the features, and products with rows sum over these.

    Attributes:
      columns: paths of submodules, "attention.query" say, whose last dimension is
        split: of their kernels and biases.
      rows: paths of submodules whose kernels are split along the dimension before the
        last. Their biases are added by the first device alone.
      dims: paths of parameters ("query.kernel") that are split along another dimension,
        counted from the end; an ``nnx.LinearGeneral`` to heads has -2.
      counts: what the axis must divide besides, by name: {"num_heads": 32}.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


def mark_splits(
    model: nnx.Module,
    mesh: Any,
    by_path: Mapping[tuple[str, ...], Split],
    is_parameter: Callable[[tuple, Any], bool],
) -> None:
    """Marks what "tensor" and "expert" split of a new model's parameters, in place.

    The marks are the same on every mesh; one without an axis does not look at them.

    Args:
      model: concrete or traced.
      mesh: abstract or not.
      by_path: further modules' splits over "tensor".
      is_parameter: an NNX filter.

    Raises:
      UserError: an axis does not divide what it splits, nothing is declared for it, or
        a declaration names no submodule.
    """
    sizes = {axis: mesh.shape.get(axis, 1) for axis in (TENSOR, EXPERT)}
    found = dict.fromkeys(sizes, False)
    _check_paths(model, by_path)
    for path, variable in variables(model):
        annotated = variable.get_metadata("out_sharding", None) or ()
        for axis in {TENSOR, EXPERT} & set(annotated):
            if axis in sizes and mesh.shape.get(axis):
                name = ".".join(map(str, path))
                raise UserError(
                    f"mesh: {name!r} is annotated with the axis {axis!r}, which is not "
                    "automatic: jshard splits what modules declare; give an automatic "
                    "axis another name, or leave the annotation out"
                )
    for path, module in list(nnx.iter_modules(model)):
        where = ".".join(map(str, path)) or type(module).__name__
        parameters = {
            ".".join(map(str, inner)): variable
            for inner, variable in variables(module)
            if is_parameter((*path, *inner), variable)
        }
        named = by_path.get(tuple(map(str, path)))
        split = named or getattr(module, "tensor_split", None)
        if split is not None:
            _check_counts(split.counts, TENSOR, sizes[TENSOR], where)
            for name, dim in _dims(split, parameters, where).items():
                found[TENSOR] = True
                _mark(parameters[name], dim, TENSOR, sizes[TENSOR], f"{where}.{name}")
        if experts := getattr(module, "expert_split", None):
            for name, variable in _of(experts, parameters, where).items():
                found[EXPERT] = True
                dim = layer_dims(variable) - np.ndim(variable.get_value())
                _mark(variable, dim, EXPERT, sizes[EXPERT], f"{where}.{name}")
    _check_declared(model, sizes, found)


def _check_paths(model: nnx.Module, by_path: Mapping[tuple[str, ...], Any]) -> None:
    """Raises UserError unless each path leads to a plain module."""
    modules = {tuple(map(str, path)): m for path, m in nnx.iter_modules(model)}
    for path in by_path:
        name = ".".join(path)
        if path not in modules:
            inside = sorted(".".join(path) for path in modules if path)
            raise UserError(
                f"tensor_splits: the model has no module {name!r}; it has "
                f"{some_of(inside, limit=12) or 'none'}"
            )
        if hasattr(type(modules[path]), "plain_class"):
            raise UserError(
                f"tensor_splits: {name!r} is a Stack or a Unit, with residuals and "
                "norms; name the modules within it that end with split rows"
            )


def _check_declared(
    model: nnx.Module, sizes: Mapping[str, int], found: Mapping[str, bool]
) -> None:
    how = {
        TENSOR: "give its modules a tensor_split, or name them in "
        "jshard.FSDP(tensor_splits=...) (docs/how_to/tensor.md)",
        EXPERT: "give the module that holds its experts an expert_split "
        "(docs/how_to/experts.md)",
    }
    for axis, size in sizes.items():
        if size > 1 and not found[axis]:
            raise UserError(
                f"mesh: {axis}={size}, but {type(model).__name__} declares nothing "
                f"that this axis splits: {how[axis]}"
            )


def _check_counts(counts: Mapping[str, int], axis: str, size: int, where: str) -> None:
    for name, count in counts.items():
        if count % size:
            raise UserError(
                f"mesh: {axis}={size} does not divide {name}={count} of {where!r}; "
                "choose a divisor"
            )


def _dims(
    split: Split, parameters: Mapping[str, nnx.Variable], where: str
) -> dict[str, int | None]:
    """Returns the split dimension of each parameter, or None for ``ON_FIRST``."""
    dims: dict[str, int | None] = {}
    for name in _of(split.columns, parameters, where):
        if not name.endswith("lora_a"):  # the columns are those of lora_b
            dims[name] = -1
    for name, variable in _of(split.rows, parameters, where).items():
        own = np.ndim(variable.get_value()) - layer_dims(variable)
        if not name.endswith("lora_b"):
            dims[name] = -2 if own > 1 else None
    for name in _of(tuple(split.dims), parameters, where):
        dims[name] = split.dims[name]
    return dims


def _of(
    paths: tuple[str, ...], parameters: Mapping[str, nnx.Variable], where: str
) -> dict[str, nnx.Variable]:
    """Returns the parameters at, or within, any of ``paths``."""
    chosen = {}
    for path in paths:
        within = {
            name: variable
            for name, variable in parameters.items()
            if name == path or name.startswith(f"{path}.")
        }
        if not within:
            raise UserError(f"Split: {where!r} has no parameters at {path!r}")
        chosen |= within
    return chosen


def _mark(
    variable: nnx.Variable, dim: int | None, axis: str, size: int, name: str
) -> None:
    if dim is None:
        variable.set_metadata(ON_FIRST, axis)
        return
    shape = np.shape(variable.get_value())
    if shape[dim] % size:
        raise UserError(
            f"mesh: {axis}={size} does not divide dimension {dim} of {name!r}, "
            f"{list(shape[layer_dims(variable) :])}; choose a divisor"
        )
    marked = variable.get_metadata(SPLITS, ())
    variable.set_metadata(SPLITS, (*marked, (dim, axis)))


def splits_of(variable: nnx.Variable, mesh: Any) -> tuple[tuple[int, str], ...]:
    """Returns (dimension, axis) of each axis of a mesh that splits a parameter."""
    marked = variable.get_metadata(SPLITS, ())
    return tuple((dim, axis) for dim, axis in marked if mesh.shape.get(axis, 1) > 1)


def on_first_of(variable: nnx.Variable, mesh: Any) -> str | None:
    """Returns the axis of a mesh whose first device alone adds a parameter."""
    axis = variable.get_metadata(ON_FIRST, None)
    return axis if mesh.shape.get(axis, 1) > 1 else None
