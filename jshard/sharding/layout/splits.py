"""What a model declares to be split over "tensor" and "expert", and so not gathered.

A module says which of its submodules have their columns or rows split over "tensor"
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053, section 3) in an attribute
``tensor_split``, and which hold experts in ``expert_split``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.variables import variables
from jshard.sharding.settings.mesh import EXPERT, TENSOR
from jshard.sharding.settings.state import TrainState
from jshard.system.errors import UserError, some_of


@dataclasses.dataclass(frozen=True)
class Split:
    """How the parameters of a module's submodules are split over "tensor".

    The module computes within ``jshard.nn.tensor_parallel``: products with columns give
    each device some of the features, and products with rows sum over these.

    Attributes:
      columns: paths of submodules, "attention.query" say, whose last dimension is
        split: of their kernels and biases.
      vocabulary: paths of heads, whose columns are split like ``columns``. Where the
        axis does not divide these, they are padded with zeros, as in Megatron-LM;
        ``jshard.nn.cross_entropy(vocabulary=)`` leaves the padding out.
      rows: paths of submodules whose kernels are split along the dimension before the
        last. Their biases are added by the first device alone.
      dims: paths of parameters ("query.kernel") that are split along another dimension,
        counted from the end; an ``nnx.LinearGeneral`` to heads has -2.
      counts: what the axis must divide besides, by name: {"num_heads": 32}.
      tokens: of a module in ``FSDP(tensor_splits=)``, the arguments of its call that
        have tokens, as of ``jshard.nn.tensor_parallel``; None says nothing of them.
    """

    columns: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: tuple[str, ...] | None = None


class Parts(NamedTuple):
    """What devices have of one parameter (see ``Placement``).

    Attributes:
      splits: (dimension from the end, axis) pairs.
      on_rank_zero: the axis on whose first device alone a layer gets the parameter.
    """

    splits: tuple[tuple[int, str], ...] = ()
    on_rank_zero: str | None = None


WHOLE = Parts()


def find_splits(
    state: TrainState, mesh: Any, by_path: Mapping[tuple[str, ...], Split]
) -> dict[tuple, Parts]:
    """Returns what "tensor" and "expert" split of a state's parameters, by path.

    ``by_path`` has further modules' splits over "tensor".

    Raises:
      UserError: an axis does not divide what it splits, nothing is declared for it, or
        a declaration names no submodule.
    """
    axes = {axis for axis in (TENSOR, EXPERT) if mesh.shape.get(axis, 1) > 1}
    if not axes and not by_path:
        return {}
    model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
    own = {
        path for tree in state.model_arrays[:2] for path, _ in nnx.to_flat_state(tree)
    }
    paths = {id(v): path for path, v in variables(model) if path in own}
    _check_paths(model, by_path)
    _check_annotations(model, axes)
    found: dict[tuple, Parts] = {}
    for path, module in list(nnx.iter_modules(model)):
        where = ".".join(map(str, path)) or type(module).__name__
        parameters = {
            ".".join(map(str, inner)): variable
            for inner, variable in variables(module)
            if id(variable) in paths
        }
        declared = by_path.get(tuple(map(str, path)))
        declared = declared or getattr(module, "tensor_split", None)
        chosen: list[tuple[str, str, int | None]] = []
        padded: set[str] = set()
        if TENSOR in axes and declared is not None:
            for name, count in declared.counts.items():
                _check_divides(mesh, TENSOR, count, f"{name}={count} of {where!r}")
            dims = _dims(declared, parameters, where)
            padded = set(_of(declared.vocabulary, parameters, where))
            chosen += [(name, TENSOR, dim) for name, dim in dims.items()]
        if EXPERT in axes and (experts := getattr(module, "expert_split", None)):
            for name, variable in _of(experts, parameters, where).items():
                dim = layer_dims(variable) - np.ndim(variable.get_value())
                chosen.append((name, EXPERT, dim))
        for name, axis, dim in chosen:
            variable = parameters[name]
            at = paths[id(variable)]
            parts = found.get(at, WHOLE)
            if dim is None:
                found[at] = parts._replace(on_rank_zero=axis)
                continue
            if name not in padded:
                shape = np.shape(variable.get_value())
                what = f"dimension {dim} of {f'{where}.{name}'!r}, "
                what += str(list(shape[layer_dims(variable) :]))
                _check_divides(mesh, axis, shape[dim], what)
            found[at] = parts._replace(splits=(*parts.splits, (dim, axis)))
    split = {axis for parts in found.values() for _, axis in parts.splits}
    for axis in sorted(axes - split):
        name, why = type(model).__name__, getattr(model, "splits_sequences", True)
        if axis == TENSOR and isinstance(why, str):
            raise UserError(f"mesh: {axis}={mesh.shape[axis]} is not for {name}: {why}")
        raise UserError(
            f"mesh: {axis}={mesh.shape[axis]}, but {name} declares "
            f"nothing that this axis splits: {_HOW[axis]}"
        )
    return found


_HOW = {
    TENSOR: "give its modules a tensor_split, or name them in "
    "jshard.FSDP(tensor_splits=...) (docs/how_to/tensor.md)",
    EXPERT: "give the module that holds its experts an expert_split "
    "(docs/how_to/experts.md)",
}


def _check_annotations(model: nnx.Module, axes: set[str]) -> None:
    for path, variable in variables(model):
        annotated = variable.get_metadata("out_sharding", None) or ()
        for axis in axes & set(annotated):
            name = ".".join(map(str, path))
            raise UserError(
                f"mesh: {name!r} is annotated with the axis {axis!r}, which is not "
                "automatic: jshard splits what modules declare; give an automatic "
                "axis another name, or leave the annotation out"
            )


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


def _dims(
    split: Split, parameters: Mapping[str, nnx.Variable], where: str
) -> dict[str, int | None]:
    """Returns the split dimension of each parameter, or None for ``on_rank_zero``."""
    dims: dict[str, int | None] = {}
    for name in _of((*split.columns, *split.vocabulary), parameters, where):
        if not name.endswith("lora_a"):  # the columns are those of lora_b
            dims[name] = -1
    for name, variable in _of(split.rows, parameters, where).items():
        own = np.ndim(variable.get_value()) - layer_dims(variable)
        if name.endswith("lora_m"):
            raise UserError(
                f"mesh: {TENSOR} splits the rows of '{where}.{name[:-7]}', and DoRA "
                "needs the norms of whole columns: leave such layers out of the "
                f"targets of LoRA, or use a mesh without {TENSOR}"
            )
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


def _check_divides(mesh: Any, axis: str, size: int, what: str) -> None:
    if size % mesh.shape[axis]:
        raise UserError(
            f"mesh: {axis}={mesh.shape[axis]} does not divide {what}; choose a divisor"
        )
