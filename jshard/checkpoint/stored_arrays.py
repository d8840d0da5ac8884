"""Which arrays of a checkpoint are those of a state, and reading them."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as ocp

from jshard.checkpoint import metadata
from jshard.checkpoint.described import STORED_SHAPE
from jshard.checkpoint.older_names import renamed, stored_names
from jshard.compat.orbax import open_array
from jshard.errors import UserError, some_of
from jshard.fsdp.state import TrainState
from jshard.nn.dropout import is_random

ARRAYS = "state"  # Orbax's folder in a step's folder

Named = dict[str, tuple[str, Any]]


def match_parameters(
    folder: Path, state: TrainState, optimizer: bool
) -> tuple[Named, Named]:
    """Finds the arrays that ``read_parameters`` replaces, and their sources.

    Returns:
      The arrays of the state as (name, array) and those of the checkpoint as (stored
      name, metadata), both by a name that is the same whether a parameter is trained
      or frozen.
    """
    stored = metadata.read(folder)["arrays"]
    names = stored_names(state, stored)
    variables = metadata.variables_by_name(state)
    kinds = ("params", "frozen", "model_state", *optimizer * ("opt_state", "ema"))

    def selected(arrays: Mapping[str, Any], random: set[str]) -> Named:
        found = {}
        for name, array in arrays.items():
            kind, _, rest = name.partition(".")
            if kind in kinds and name not in random:
                found[f"params.{rest}" if kind == "frozen" else name] = name, array
        return found

    random = {name for name, variable in variables.items() if is_random(variable)}
    targets = selected(metadata.arrays_by_name(state), random)
    described = renamed(stored, names)
    random = {name for name, entry in described.items() if entry.get("random")}
    sources = selected(described, random)
    new = {
        key
        for key, (name, _) in targets.items()
        if isinstance(variables.get(name), nnx.LoRAParam) and key not in sources
    }
    targets = {key: leaf for key, leaf in targets.items() if key not in new}
    return targets, {
        key: (names.get(name, name), entry) for key, (name, entry) in sources.items()
    }


def open_stored(folder: Path, about: Mapping[str, Any], name: str, context: Any) -> Any:
    """Opens an array of a step, to be read chunk by chunk.

    Raises:
      UserError: The step has no such array, or not as its description says.
    """
    described = about["arrays"][name]
    try:
        store = open_array(folder / ARRAYS, name, context)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"cannot read {name} of {folder}, which was intact a moment ago: has the "
            f"run deleted it? ({error})"
        ) from error
    shape, dtype = list(store.shape), store.dtype.name
    padded = described.get(STORED_SHAPE, described["shape"])
    if (shape, dtype) != (padded, described["dtype"]):
        raise UserError(
            f"checkpoint {folder} is damaged: {name} is {dtype}{shape}, and "
            f"{metadata.FILE} says {described['dtype']}{padded}"
        )
    return store[tuple(map(slice, described["shape"]))]


def check(
    folder: Path, wanted: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares names, shapes and dtypes; warns about floating-point conversions."""
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"it lacks {some_of(missing)}")
    if unexpected := sorted(stored.keys() - wanted.keys()):
        problems.append(f"it has unexpected {some_of(unexpected)}")
    casts: dict[tuple[str, str], int] = {}
    for name in sorted(wanted.keys() & stored.keys()):
        shape, dtype = wanted[name].shape, str(wanted[name].dtype)
        stored_shape, stored_dtype = tuple(stored[name]["shape"]), stored[name]["dtype"]
        if stored_shape != shape:
            problems.append(f"{name} has shape {stored_shape}, not {shape}")
        elif stored_dtype != dtype:
            if not ("float" in stored_dtype and "float" in dtype):
                problems.append(f"{name} has dtype {stored_dtype}, not {dtype}")
            casts[stored_dtype, dtype] = casts.get((stored_dtype, dtype), 0) + 1
    if problems:
        raise UserError(
            f"checkpoint {folder} is of another model or optimizer: "
            f"{some_of(problems, '; ')}"
        )
    for (stored_dtype, dtype), count in casts.items():
        warnings.warn(
            f"{count} arrays of checkpoint {folder} are read as {dtype}, saved as "
            f"{stored_dtype}",
            stacklevel=3,
        )


def load(
    folder: Path, wanted: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, jax.Array]:
    """Reads the ``wanted`` arrays, stored under ``names``; each device its shards.

    Padding is zeros, stored and read: there may be more or less of it.
    """
    arrays = {names[name]: array for name, array in wanted.items()}
    context = ocp.Context()
    stored = metadata.read(folder)["arrays"]
    context.array.loading.enable_padding_and_truncation = True
    context.pytree.loading.partial_load = arrays.keys() != stored.keys()
    with context:
        tree = ocp.load((folder / ARRAYS).absolute(), unflatten_dict(arrays, sep="."))
    found: dict[str, Any] = flatten_dict(tree, sep=".")
    owners = {names[name]: name for name in wanted}
    # Arrays that share a stored one are copied: a step donates the buffer of each.
    return {
        name: found[stored] if owners[stored] == name else jnp.copy(found[stored])
        for name in wanted
        for stored in [names[name]]
    }
