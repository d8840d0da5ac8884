"""Which dimension of each parameter is sharded, and the specs of a whole state."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jshard.layout.placement import Placement
from jshard.mesh import AXES, FSDP
from jshard.policy import Policy
from jshard.state import TrainState

LAYER_DIMS = "layer_dims"  # metadata of a Stack's variables: leading layer dimensions
LOOKED_UP = "looked_up"  # metadata of an embedding's table, in a Unit of its own
IN_LAYER = "in_layer"  # metadata of the same: its path in a layer of each Stack


def shard_dim(
    shape: tuple[int, ...],
    shards: int,
    *,
    layer_dims: int = 0,
    min_elements: int = 0,
    taken: Sequence[Any] = (),
    looked_up: bool = False,
) -> int | None:
    """The dimension to shard, counted from the end, or None to replicate.

    It is the first one, not counting the layer dimensions of a Stack, that ``shards``
    divides and no other mesh axis has taken: contiguous on the wire, no transposes.
    Of a table that is looked up it is the last one: every device has a part of each
    row (``jshard.comm.embedding``).

    Args:
      shape: the parameter's shape, layer dimensions first.
      shards: size of the fsdp axis.
      layer_dims: leading layer dimensions, never sharded.
      min_elements: parameters with fewer elements a layer are replicated.
      taken: for each dimension of one layer, the mesh axes it is split over already.
      looked_up: whether it is the table of an embedding.
    """
    own = shape[layer_dims:]
    if np.prod(own) < min_elements:
        return None
    for i, size in sorted(enumerate(own), reverse=looked_up):
        if size and size % shards == 0 and not any(taken[i : i + 1]):
            return i - len(own)
    return None


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


def is_annotated(variable: nnx.Variable) -> bool:
    """Whether Flax metadata names mesh axes for the dimensions of ``variable``."""
    return variable.get_metadata("out_sharding", None) is not None


def _other_axes(variable: nnx.Variable, mesh: Mesh) -> tuple[Any, ...]:
    """The automatic mesh axes that annotate each dimension of one layer."""
    names = variable.get_metadata("out_sharding", None) or ()
    free = set(mesh.axis_names) - set(AXES)

    def known(axes: Any) -> tuple[str, ...]:
        axes = axes if isinstance(axes, tuple) else (axes,)
        return tuple(axis for axis in axes if axis in free)

    return tuple(known(axes) or None for axes in names)


def _dim(variable: nnx.Variable, policy: Policy, mesh: Mesh) -> int | None:
    return shard_dim(
        np.shape(variable.get_value()),
        mesh.shape[FSDP],
        layer_dims=layer_dims(variable),
        min_elements=policy.min_shard_elements,
        taken=_other_axes(variable, mesh),
        looked_up=variable.get_metadata(LOOKED_UP, False),
    )


def placements(
    params: nnx.State, frozen: nnx.State, policy: Policy, mesh: Mesh
) -> dict[tuple, Placement]:
    """The Placement of every parameter by its path; ``frozen`` ones have no gradient.

    The arrays are the global ones: shapes, not shards, decide.
    """
    places = {}
    for state, trainable in ((params, True), (frozen, False)):
        for path, variable in nnx.to_flat_state(state):
            precision = policy.precision_at(path)
            dim = _dim(variable, policy, mesh)
            places[path] = Placement(
                dim,
                precision.gather,
                precision.compute,
                precision.reduce,
                precision.sum,
                trainable,
                hosted=policy.offload == "all" and dim is not None,
            )
    return places


def param_spec(variable: nnx.Variable, policy: Policy, mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter, other mesh axes included."""
    dim = _dim(variable, policy, mesh)
    others = _other_axes(variable, mesh)
    if dim is None and not any(others):
        return PartitionSpec()
    ndim = len(np.shape(variable.get_value()))
    axes: list[Any] = [*[None] * layer_dims(variable), *others]
    axes += [None] * (ndim - len(axes))
    if dim is not None:
        axes[dim] = FSDP
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def manual_specs(specs: Any) -> Any:
    """The part of each spec that ``shard_map`` handles: the "fsdp" axis."""
    return jax.tree.map(
        lambda spec: PartitionSpec(*(a if a == FSDP else None for a in spec)), specs
    )


def param_specs(params: Any, policy: Policy, mesh: Mesh) -> Any:
    """PartitionSpecs for an ``nnx.State`` of parameters, same structure."""

    def spec(variable: nnx.Variable) -> nnx.Variable:
        if not jax.tree.leaves(variable):  # masked by an optimizer
            return variable
        return variable.copy(param_spec(variable, policy, mesh))

    return jax.tree.map(spec, params, is_leaf=lambda v: isinstance(v, nnx.Variable))


def replicated_specs(tree: Any) -> Any:
    """A replicated spec for every leaf of ``tree``."""
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def follow(params: Any, values: Sequence[Any]) -> Callable[[tuple, Any], Any]:
    """Tells which parameter a leaf of an optimizer's state follows.

    A leaf whose path ends with a parameter's path, and has its shape, follows it
    (momenta, averages); others (counts, factored statistics) follow none. Names
    decide, not tree positions, so wrapped and masked optimizers work as they are.

    Args:
      params: the parameters.
      values: for each leaf of ``params``, what to find.

    Returns:
      ``find(path, leaf)``: the value of the parameter that the leaf follows, or None.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        tuple(map(str, path)): (np.shape(leaf), value)
        for (path, leaf), value in zip(leaves, values, strict=True)
    }
    lengths = sorted({len(path) for path in by_path}, reverse=True)

    def find(path: tuple[Any, ...], leaf: Any) -> Any:
        names = tuple(map(str, path))
        for length in lengths:
            shape, value = by_path.get(names[len(names) - length :], (None, None))
            if shape == np.shape(leaf):
                return value
        return None

    return find


def state_specs(state: TrainState, policy: Policy, mesh: Mesh) -> TrainState:
    """PartitionSpecs for every array of a state."""
    params = param_specs(state.params, policy, mesh)
    return dataclasses.replace(
        state,
        step=PartitionSpec(),
        params=params,
        frozen=param_specs(state.frozen, policy, mesh),
        model_state=replicated_specs(state.model_state),
        opt_state=optimizer_specs(state.opt_state, state.params, params),
        ema=param_specs(state.ema, policy, mesh),
        loss_scale=replicated_specs(state.loss_scale),
    )


def optimizer_specs(opt_state: Any, params: Any, specs: Any) -> Any:
    """PartitionSpecs for an optimizer's state.

    What follows a parameter is sharded like it; everything else is replicated.
    """
    find = follow(params, _spec_leaves(specs))

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        found = find(path, leaf)
        return PartitionSpec() if found is None else found

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def _spec_leaves(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
