"""Checks of what a user passes to FSDP, with errors that say what to do."""

import fnmatch
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard.compat.absent_gpus import cudnn_version
from jshard.errors import UserError, some_of
from jshard.float8.blocks import MXFP8
from jshard.fsdp.mesh import (
    CONTEXT,
    FSDP,
    REPLICA,
    devices_of_a_sequence,
    named_sizes,
    shards_of,
)
from jshard.fsdp.policy import OF_STACKS, OF_UNITS, Policy, prefixes
from jshard.fsdp.precision import is_float
from jshard.fsdp.state import TrainState
from jshard.layout.layer_dims import layer_dims
from jshard.layout.state_layout import Layout
from jshard.layout.variables import variables
from jshard.unit.modules import Stack, is_unit, own_paths

# Variables that calls of a model change or draw from; they have no gradients.
_STATE = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)


# The first GPUs that multiply so, and cuDNN's version from which XLA has MXFP8 of it.
_CAPABILITY = {
    "float8": ((8, 9), "Ada, Hopper, Blackwell"),
    MXFP8: ((10, 0), "Blackwell"),
}
_CUDNN = (9, 10)
_MUCH = 1 << 20  # parameters that are whole on every device


def check_precisions(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if float8 products or 4 bits do not go with mesh or policy."""
    _check_products(policy, mesh)
    _check_base(policy, mesh)


def _check_products(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the policy wants float8 products that cannot be had."""
    for kind in sorted(policy.products()):
        setting = f"precision.products={kind!r}"
        if policy.offload == "all":
            raise UserError(
                f"{setting} cannot be combined with policy.offload='all': scales need "
                "all shards on the device; use offload='optimizer'"
            )
        if isinstance(mesh, AbstractMesh):
            continue
        if (device := mesh.devices.flat[0]).platform == "gpu":
            _check_gpu(kind, device)


def _check_gpu(kind: str, device: Any) -> None:
    """Raises UserError if XLA would dequantize operands for this GPU."""
    capability = str(getattr(device, "compute_capability", None) or "")
    numbers = tuple(map(int, capability.split("."))) if "." in capability else None
    least, names = _CAPABILITY[kind]
    if (numbers is None and kind == MXFP8) or (numbers and numbers < least):
        has_float8 = numbers is not None and numbers >= _CAPABILITY["float8"][0]
        raise UserError(
            f"precision.products={kind!r} needs NVIDIA GPUs of compute capability "
            f"{least[0]}.{least[1]} or newer ({names}); {device.device_kind} has "
            f"{capability}; use products={'float8' if has_float8 else None!r}"
        )
    # An absent GPU is compiled for on the CPU.
    if kind == MXFP8 and jax.default_backend() == "gpu":
        if (found := cudnn_version()) < _CUDNN:
            raise UserError(
                f"precision.products={kind!r} needs cuDNN {_CUDNN[0]}.{_CUDNN[1]} or "
                f"newer; this is {found[0]}.{found[1]}: update it (pip install -U "
                "nvidia-cudnn-cu12), or use products='float8'"
            )


def _check_base(policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the policy wants 4 bits and the mesh splits weights."""
    for name, precision in policy.everywhere("precision").items():
        others = {
            axis: size
            for axis, size in mesh.shape.items()
            if axis not in (REPLICA, FSDP, CONTEXT) and size > 1
        }
        if precision.base is not None and others:
            raise UserError(
                f"policy.{name}.base={precision.base!r}: weights in 4 bits are not "
                f"split over {named_sizes(others)}; use a mesh of replica, fsdp and "
                "context"
            )


def check_trained(params: nnx.State) -> None:
    """Raises UserError unless ``params`` has parameters, all of them trainable."""
    if not jax.tree.leaves(params):
        raise UserError(
            "the model has no parameters that wrt selects; nothing can be trained"
        )
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(map(str, path))
        if not isinstance(variable, nnx.Variable) or isinstance(variable, _STATE):
            raise UserError(
                f"wrt selects {name!r}, a {type(variable).__name__}; it must select "
                "nnx.Param variables, or types of your own that hold weights"
            )
        for value in jax.tree.leaves(variable):
            if not is_float(value):
                raise UserError(
                    f"wrt selects {name!r} of {value.dtype}; only floating-point "
                    "parameters can be trained"
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
            problem += "are in no unit are gathered once a step"
        found = some_of(names, limit=12) or "none"
        raise UserError(f"units: {problem}; its submodules are of types {found}")


def check_model(model: nnx.Module, policy: Policy, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError unless policy and mesh fit a model with its Units."""
    found = {path: module for path, module in nnx.iter_modules(model) if path}
    units = [path for path, module in found.items() if is_unit(module)]
    stacks = [path for path in units if isinstance(found[path], Stack)]
    for pattern, fields in policy.overrides.items():
        _check_override(pattern, set(fields), prefixes(found), units, stacks)
    _check_layer_counts(policy, model)
    _check_splits_sequences(model, mesh)


def _check_override(
    pattern: str,
    fields: set[str],
    modules: list[str],
    units: Sequence[tuple],
    stacks: Sequence[tuple],
) -> None:
    """Raises UserError if a pattern matches no module, or fields have no effect."""
    if not fnmatch.filter(modules, pattern):
        raise UserError(
            f"policy.overrides: {pattern!r} matches no module; modules are "
            f"{', '.join(modules[:12])}"
        )
    for kind, paths, of_kind in (
        ("Stacks and Units", units, set(OF_UNITS) - OF_STACKS),
        ("Stacks", stacks, OF_STACKS),
    ):
        useless, names = sorted(fields & of_kind), prefixes(paths)
        if useless and not fnmatch.filter(names, pattern):
            raise UserError(
                f"policy.overrides[{pattern!r}]: {', '.join(useless)} applies to "
                f"entire {kind}, and the pattern matches none of "
                f"{', '.join(names) or 'them'}"
            )


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


def warn_of_large_root(model: nnx.Module, state: TrainState, layout: Layout) -> None:
    """Warns if more than a quarter of the parameters are in no Stack or Unit."""
    own = own_paths(model)
    size = {
        ".".join(map(str, path)): variable.get_value().size
        for path, variable in state.flat_params()
        if path in own and layout.places[path].dim is not None
    }
    total = sum(x.size for x in jax.tree.leaves((state.params, state.frozen)))
    part = sum(size.values()) / total
    if part > 1 / 4 and shards_of(layout.mesh) > 1:
        largest = sorted(size, key=lambda name: -size[name])[:3]
        warnings.warn(
            f"{part:.0%} of the parameters are in no Stack or Unit, so they are "
            "gathered at the start of a step and kept: wrap the modules of "
            f"{', '.join(largest)} in jshard.Unit, or name their types in units=",
            stacklevel=4,  # the caller of FSDP.init
        )


def warn_of_replicated(state: TrainState, layout: Layout) -> None:
    """Warns if much of a model is whole on every device."""
    size = {
        ".".join(map(str, path)): variable.get_value().size
        for path, variable in state.flat_params()
        if layout.places[path].dim is None
    }
    total = sum(x.size for x in jax.tree.leaves((state.params, state.frozen)))
    part = sum(size.values()) / total
    if part > 1 / 20 and sum(size.values()) > _MUCH and shards_of(layout.mesh) > 1:
        largest = sorted(size, key=lambda name: -size[name])[:3]
        warnings.warn(
            f"{part:.0%} of the parameters are whole on every device, above all "
            f"{', '.join(largest)}: they have fewer than policy.min_shard_elements="
            f"{layout.policy.min_shard_elements} elements (lower it), or further mesh "
            "axes split all their dimensions",
            stacklevel=4,  # the caller of FSDP.init
        )


def warn_of_own_dtypes(state: TrainState, layout: Layout) -> None:
    """Warns if most parameters are in modules whose own dtype is kept."""
    size = {}
    for path, variable in state.flat_params():
        asked = layout.policy.precision_at(path).compute
        kept, value = layout.places[path].compute, variable.get_value()
        real = jnp.issubdtype(value.dtype, jnp.floating)
        if asked is not None and real and kept != asked:
            size[".".join(map(str, path))] = value.size
    total = sum(x.size for x in jax.tree.leaves((state.params, state.frozen)))
    if sum(size.values()) > total / 2:
        largest = sorted(size, key=lambda name: -size[name])[:3]
        warnings.warn(
            f"{sum(size.values()) / total:.0%} of the parameters are in modules whose "
            "own dtype is wider than precision.compute, and is kept: leave out the "
            f"dtype of the modules of {', '.join(largest)}, or give them a precision "
            "in policy.overrides",
            stacklevel=4,  # the caller of FSDP.init
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
