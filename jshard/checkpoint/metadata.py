"""A checkpoint's metadata: its arrays, library versions, mesh and config."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.described import STORED_SHAPE, checked
from jshard.checkpoint.untrusted import read_json
from jshard.compat.versions import versions
from jshard.errors import UserError
from jshard.four_bit.base import FOUR_BIT, four_bit_of
from jshard.fsdp.state import TrainState
from jshard.layout.layer_dims import layer_dims
from jshard.layout.padding import exact_types
from jshard.layout.variables import is_variable
from jshard.nn.adapted import ALPHA, STABILIZED
from jshard.nn.dropout import is_random
from jshard.unit.modules import Stack

FILE = "description.json"


def arrays_by_name(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state by their names in a checkpoint.

    Names such as "params.blocks.up.kernel" depend only on the model and the optimizer,
    not on the mesh, the policy or the version of Flax. Arrays without elements are left
    out because Orbax rejects them.

    Args:
      state: Concrete or abstract.

    Raises:
      ValueError: Two arrays have the same name.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = array_name(path)
        if name in found:
            raise ValueError(f"two arrays of the state are named {name!r}")
        if np.prod(np.shape(leaf)):
            found[name] = leaf
    return found


def exact_by_name(state: TrainState) -> dict[str, Any]:
    """Returns a state's abstract arrays by name, without shardings and padding."""
    return arrays_by_name(exact_types(state))


def replace_arrays(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """Returns ``state`` with the arrays that ``arrays`` names replaced."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: arrays.get(array_name(path), leaf), state
    )


def array_name(path: tuple) -> str:
    """Returns the name of an array from its path in a state."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # A Flax variable is a node with one leaf, its value.
    return ".".join(parts[:-1] if parts[-1] == "value" and len(parts) > 1 else parts)


def variables_by_name(state: TrainState) -> dict[str, nnx.Variable]:
    """Returns the Flax variables of a state's model and averages by array name."""
    return {
        f"{kind}.{'.'.join(map(str, path))}": variable
        for kind in ("params", "frozen", "model_state", "ema")
        if (tree := getattr(state, kind)) is not None
        for path, variable in nnx.to_flat_state(tree)
        if is_variable(variable)  # rather than a plain array
    }


def describe(
    state: TrainState, *, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Returns metadata, ready for JSON, of a concrete or abstract state."""
    arrays, padded = exact_by_name(state), arrays_by_name(state)
    sharding = next(iter(padded.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, jax.NamedSharding) else None
    plain = {"layer_dims": 0, "random": False}  # of arrays that are in no Variable
    described: dict[str, dict[str, Any]] = {
        name: {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            **_stored_shape(padded[name].shape, array.shape),
            **(plain if name.startswith("model_state.") else {}),
        }
        for name, array in arrays.items()
    }
    for name, variable in variables_by_name(state).items():
        if name in described:
            described[name]["layer_dims"] = layer_dims(variable)
            described[name]["random"] = is_random(variable)
            if (four_bit := four_bit_of(variable)) is not None:
                described[name][FOUR_BIT] = four_bit.kind
            if isinstance(variable, nnx.LoRAParam):
                for key in (ALPHA, STABILIZED):
                    described[name][key] = variable.get_metadata(key, None)
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "mesh": dict(mesh.shape) if isinstance(mesh, Mesh) else {},
        "processes": jax.process_count(),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "config": dict(config),
        "stacks": _stack_paths(state),
        "arrays": described,
    }


def _stack_paths(state: TrainState) -> list[str]:
    """Returns the dotted paths of a model's Stacks; "" if the model is itself one."""
    model = nnx.merge(state.graphdef, state.params, state.frozen, state.model_state)
    return [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Stack)
    ]


def _stored_shape(stored: tuple[int, ...], exact: tuple[int, ...]) -> dict[str, Any]:
    return {} if stored == exact else {STORED_SHAPE: list(stored)}


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the metadata of a step durably."""
    replace_file(folder / FILE, json.dumps(content, indent=1, default=str))


def read(folder: Path) -> dict[str, Any]:
    """Reads the metadata of a step.

    Raises:
      UserError: It cannot be read, or is not a checkpoint's.
    """
    try:
        content = read_json(folder / FILE)
    except OSError as error:
        why = f"{FILE} cannot be read ({error.strerror})"
    except ValueError as error:
        why = f"{FILE} is not JSON ({error})"
    else:
        try:
            return checked(content)
        except ValueError as error:
            why = f"{FILE} describes no checkpoint: {error}"
    raise UserError(f"checkpoint {folder} is damaged: {why}")
