"""Checks of what a user passes to FSDP, with errors that say what to do."""

import fnmatch
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard.sharding.float8.formats import FORMATS
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.padding import exact_types
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.variables import array_name, variables
from jshard.sharding.settings.mesh import (
    CONTEXT,
    FSDP,
    REPLICA,
    capability,
    devices_of_a_sequence,
    named_sizes,
    shards_of,
)
from jshard.sharding.settings.policy import OF_STACKS, OF_UNITS, Policy, prefixes
from jshard.sharding.settings.precision import is_float
from jshard.sharding.settings.state import TrainState
from jshard.sharding.units.modules import Stack, is_unit, own_paths
from jshard.sharding.update.skipping.skip_spikes import within_spikes
from jshard.sharding.update.stacks.layers_apart import check_layers
from jshard.system.compat.absent_gpus import cudnn_version
from jshard.system.errors import UserError, some_of

# Variables that calls of a model change or draw from; they have no gradients.
_STATE = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)


# The first GPUs that multiply so, and cuDNN's version from which XLA has blocks of it.
_CAPABILITY = {
    "float8": ((8, 9), "Ada, Hopper, Blackwell"),
    "mxfp8": ((10, 0), "Blackwell"),
    "nvfp4": ((10, 0), "Blackwell"),
}
_CUDNN = (9, 10)
_MUCH = 1 << 20  # parameters that are whole on every device


def check_precisions(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if float8 products or 4 bits do not go with mesh or policy."""
    for name, precision in policy.everywhere("precision").items():
        if precision.base is None:
            continue
        whole = (REPLICA, FSDP, CONTEXT)  # axes over which no weight is split
        sizes = {a: n for a, n in mesh.shape.items() if a not in whole and n > 1}
        if sizes:
            raise UserError(
                f"policy.{name}.base={precision.base!r}: weights in 4 bits are not "
                f"split over {named_sizes(sizes)}; use a mesh of replica, fsdp and "
                "context"
            )
    for kind in sorted(policy.products()):
        if policy.offload == "all":
            raise UserError(
                f"precision.products={kind!r} cannot be combined with "
                "policy.offload='all': scales need all shards on the device; use "
                "offload='optimizer'"
            )
        if not isinstance(mesh, AbstractMesh):
            _check_gpu(kind, mesh.devices.flat[0])


def _check_gpu(kind: str, device: Any) -> None:
    """Raises UserError if XLA would dequantize operands for this device, a GPU."""
    if device.platform != "gpu":
        return
    found = capability(device)
    least, names = _CAPABILITY[kind]
    if (found is None and kind in FORMATS) or (found is not None and found < least):
        has_float8 = found is not None and found >= _CAPABILITY["float8"][0]
        raise UserError(
            f"precision.products={kind!r} needs NVIDIA GPUs of compute capability "
            f"{least[0]}.{least[1]} or newer ({names}); {device.device_kind} has "
            f"{getattr(device, 'compute_capability', None) or ''}; use "
            f"products={'float8' if has_float8 else None!r}"
        )
    # An absent GPU is compiled for on the CPU.
    if kind in FORMATS and jax.default_backend() == "gpu":
        if (found := cudnn_version()) < _CUDNN:
            here = f"this is {found[0]}.{found[1]}" if any(found) else "there is none"
            raise UserError(
                f"precision.products={kind!r} needs cuDNN {_CUDNN[0]}.{_CUDNN[1]} or "
                f"newer; {here}: pip install -U nvidia-cudnn-cu12 (or -cu13), or use "
                "products='float8'"
            )


def check_shapes(state: TrainState, optimizer: Any) -> None:
    """Raises UserError unless a state can be saved, and its optimizer can train it.

    Each array needs a dotted name of its own in a checkpoint, and layers of Stacks must
    be tensors of their own to the optimizer.
    """
    inner = within_spikes(optimizer, state.opt_state)
    check_layers(inner, exact_types(state.params))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    names = sorted(array_name(path).split(".") for path in paths)
    for name, following in itertools.pairwise(names):
        if name == following[: len(name)]:
            raise UserError(
                f"two arrays of the state are named {'.'.join(name)!r} and "
                f"{'.'.join(following)!r}, which no checkpoint can hold beside each "
                "other: a dot in a name (of an nnx.Dict, say) is like one between "
                "names; rename one"
            )


def check_trained(params: nnx.State) -> None:
    """Raises UserError unless all ``params`` can be trained, of which there are."""
    if not jax.tree.leaves(params):
        raise UserError(
            "the model has no parameters that wrt selects; nothing can be trained"
        )
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(map(str, path))
        if isinstance(variable, _STATE) or not isinstance(variable, nnx.Variable):
            is_array = isinstance(variable, (jax.Array, np.ndarray))
            kind = "plain array" if is_array else type(variable).__name__
            raise UserError(
                f"wrt selects {name!r}, a {kind}; it must select nnx.Param variables, "
                "or types of your own that hold weights"
            )
        for value in jax.tree.leaves(variable):
            if not is_float(value):
                raise UserError(
                    f"wrt selects {name!r} of {value.dtype}; only floating-point "
                    "parameters can be trained"
                )


def check_fields(state: TrainState) -> None:
    """Raises UserError if a state's fields are not the model's variables by path."""
    for field in ("params", "frozen", "model_state", "ema"):
        tree = getattr(state, field)
        if field != "ema" or tree is not None:
            _check_field(f"state.{field}", tree, arrays=field == "model_state")
    if state.ema is not None:
        paths = [dict(nnx.to_flat_state(x)).keys() for x in (state.ema, state.params)]
        for path in sorted(paths[0] ^ paths[1], key=str):
            fields = ("state.ema", "state.params")
            has, lacks = fields if path in paths[0] else reversed(fields)
            raise UserError(f"{has} has {'.'.join(map(str, path))!r}, {lacks} has not")
    found = sum(len(nnx.to_flat_state(tree)) for tree in state.model_arrays)
    if found != state.graphdef.num_leaves:
        raise UserError(
            f"state.params, frozen and model_state have {found} variables, and the "
            f"model has {state.graphdef.num_leaves}; replace values, and keep the paths"
        )


def _check_field(field: str, tree: Any, *, arrays: bool) -> None:
    """Raises UserError unless a field is a State of dicts of variables."""
    write = f"write dataclasses.replace(state, {field.removeprefix('state.')}=...) with"
    if not isinstance(tree, nnx.State):
        raise UserError(
            f"{field} is {'None' if tree is None else type(tree).__name__}; it must be "
            f"an nnx.State of the model's variables by path: {write} such a State"
        )
    left: list[tuple[tuple, Any]] = [((), tree.raw_mapping)]
    for path, mapping in left:
        for key, value in mapping.items():
            name = ".".join(map(str, (*path, key)))
            if isinstance(value, dict):
                left.append(((*path, key), value))
            elif not isinstance(value, nnx.Variable) and (
                isinstance(value, nnx.State) or not arrays
            ):
                raise UserError(
                    f"{field} has a {type(value).__name__} at {name!r}, where the "
                    f"model has a variable or a dict of them: {write} an nnx.State of "
                    "the paths and types that it had, as jax.tree.map keeps them"
                )


def check_units(model: nnx.Module, units: Sequence[type]) -> None:
    """Raises UserError if no submodule is an instance of a type in ``units``."""
    inside = [module for path, module in nnx.iter_modules(model) if path]
    types = [getattr(type(module), "plain_class", type(module)) for module in inside]
    names = sorted({cls.__name__ for cls in types})
    for unit in units:
        if any(isinstance(module, unit) for module in inside):
            continue
        problem = f"the model has no {unit.__name__}"
        if isinstance(model, unit):
            problem = f"only the model itself is a {unit.__name__}, and modules that "
            problem += "are in no unit are gathered once per step"
        found = some_of(names, limit=12) or "none"
        raise UserError(f"units: {problem}; its submodules are of types {found}")


def check_model(model: nnx.Module, policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError unless policy and mesh fit a model with its Units."""
    found = {path: module for path, module in nnx.iter_modules(model) if path}
    units = [path for path, module in found.items() if is_unit(module)]
    stacks = [path for path in units if isinstance(found[path], Stack)]
    modules = prefixes(found)
    for pattern, fields in policy.overrides.items():
        if not fnmatch.filter(modules, pattern):
            raise UserError(
                f"policy.overrides: {pattern!r} matches no module; modules are "
                f"{', '.join(modules[:12])}"
            )
        for kind, paths, of_kind in (
            ("Stacks and Units", units, set(OF_UNITS) - OF_STACKS),
            ("Stacks", stacks, OF_STACKS),
        ):
            useless, names = sorted(of_kind & set(fields)), prefixes(paths)
            if useless and not fnmatch.filter(names, pattern):
                raise UserError(
                    f"policy.overrides[{pattern!r}]: {', '.join(useless)} applies to "
                    f"entire {kind}, and the pattern matches none of "
                    f"{', '.join(names) or 'them'}"
                )
    _check_layer_counts(policy, model)
    _check_splits_sequences(model, mesh)


def _check_layer_counts(policy: Policy, model: nnx.Module) -> None:
    """Raises UserError if ``policy`` counts layers that no Stack of the model has."""
    has_stacks = any(isinstance(m, Stack) for _, m in nnx.iter_modules(model))
    shapes = [np.shape(v.get_value())[: layer_dims(v)] for _, v in variables(model)]
    most = max((number for shape in shapes for number in shape), default=0)
    for name, count in policy.everywhere("first_k").items():
        if count is None:
            continue
        if not has_stacks:
            raise UserError(
                f"policy.{name} counts the layers of a jshard.Stack, and the model has "
                "none; name its Units in policy.overrides, with remat or "
                "reshard_after_forward"
            )
        if count > most:
            raise UserError(
                f"policy.{name}={count} is more layers than the model has: its largest "
                f"Stack has {most}"
            )


def surprises(model: nnx.Module, state: TrainState, layout: Layout) -> Iterator[str]:
    """Yields warnings of many parameters in the root, replicated, or in wide dtypes."""
    sizes = {path: v.get_value().size for path, v in state.flat_params()}
    places, policy, shards = layout.places, layout.policy, shards_of(layout.mesh)

    def share(paths: Sequence[tuple]) -> tuple[float, str]:
        """Returns which part of all parameters these are, and names the largest."""
        largest = sorted(paths, key=lambda path: -sizes[path])[:3]
        names = (".".join(map(str, path)) for path in largest)
        part = sum(sizes[path] for path in paths) / sum(sizes.values())
        return part, ", ".join(names)

    own = own_paths(model)
    in_root = [
        path for path in sizes if path in own and places[path].sharding.dim is not None
    ]
    part, largest = share(in_root)
    if part > 1 / 4 and shards > 1:
        yield (
            f"{part:.0%} of the parameters are in no Stack or Unit, so they are "
            "gathered at the start of a step and kept: wrap the modules of "
            f"{largest} in jshard.Unit, or name their types in units="
        )
    replicated = [path for path in sizes if places[path].sharding.dim is None]
    part, largest = share(replicated)
    many = sum(sizes[path] for path in replicated) > _MUCH
    if part > 1 / 20 and many and shards > 1:
        yield (
            f"{part:.0%} of the parameters are replicated on every device, above all "
            f"{largest}: they have fewer than policy.min_shard_elements="
            f"{policy.min_shard_elements} elements (lower it), or further mesh "
            "axes split all their dimensions"
        )

    def keeps_its_own(path: tuple, variable: nnx.Variable) -> bool:
        asked = policy.precision_at(path).compute
        real = jnp.issubdtype(variable.get_value().dtype, jnp.floating)
        return asked is not None and real and places[path].weight.compute != asked

    part, largest = share([x[0] for x in state.flat_params() if keeps_its_own(*x)])
    if part > 1 / 2:
        yield (
            f"{part:.0%} of the parameters are in modules whose own dtype is wider "
            "than precision.compute, and is kept: leave out the dtype of the modules "
            f"of {largest}, or give them a precision in policy.overrides"
        )


def _check_splits_sequences(model: nnx.Module, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if a mesh splits sequences and the model does not say it can."""
    axes = devices_of_a_sequence(mesh)
    says, name = getattr(model, "splits_sequences", False), type(model).__name__
    if axes and isinstance(says, str):  # why not
        raise UserError(f"mesh: {named_sizes(axes)} is not for {name}: {says}")
    if axes and not says:
        raise UserError(
            f"mesh: {named_sizes(axes)}, but {name} does not say that its "
            "sequences may be split: take positions from jshard.nn.positions, "
            "attend with jshard.nn.dot_product_attention, and set splits_sequences = "
            "True on the class (docs/how_to/long_sequences.md)"
        )
