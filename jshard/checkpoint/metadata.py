"""What a checkpoint says of itself: arrays, versions, mesh, config."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard import formatting
from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.tensor_names import stack_paths
from jshard.errors import UserError
from jshard.layout.specs import layer_dims
from jshard.nn.dropout import is_random
from jshard.state import TrainState
from jshard.version import __version__

FILE = "description.json"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def arrays_by_name(state: TrainState) -> dict[str, Any]:
    """The arrays of a state by the names that they have in a checkpoint.

    Names such as "params.blocks.up.kernel" come from the model and the optimizer
    alone, so they hold for any mesh, policy, and version of Flax. Arrays without
    elements are left out: they hold nothing, and Orbax refuses them.

    Args:
      state: concrete or abstract.

    Raises:
      ValueError: two arrays have the same name.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = array_name(path)
        if name in found:
            raise ValueError(f"two arrays of the state are named {name!r}")
        if np.prod(np.shape(leaf)):
            found[name] = leaf
    return found


def replace_arrays(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """Returns ``state`` with those of its arrays replaced that ``arrays`` names."""

    def replace(path: tuple, leaf: Any) -> Any:
        return arrays.get(array_name(path), leaf)

    return jax.tree_util.tree_map_with_path(replace, state)


def array_name(path: tuple) -> str:
    """The name of an array of a state from its path."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # A Flax variable is a node with one leaf, its value.
    return ".".join(parts[:-1] if parts[-1] == "value" and len(parts) > 1 else parts)


def variables_by_name(state: TrainState) -> dict[str, nnx.Variable]:
    """The Flax variables of a state's model and averages, named as their arrays."""
    trees = {
        "params": state.params,
        "frozen": state.frozen,
        "model_state": state.model_state,
        "ema": state.ema,
    }
    return {
        ".".join([kind, *map(str, path)]): variable
        for kind, tree in trees.items()
        if tree is not None
        for path, variable in nnx.to_flat_state(tree)
    }


def nest(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Turns dotted names into nested dicts, which Orbax stores."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = array
    return tree


def describe(
    state: TrainState, *, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Describes a state, as JSON.

    Args:
      state: concrete or abstract.
      config: of the run.
      metrics: of the step, e.g. of an evaluation.
    """
    arrays = arrays_by_name(state)
    sharding = next(iter(arrays.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, jax.NamedSharding) else None
    variables = variables_by_name(state)

    def entry(name: str, array: Any) -> dict[str, Any]:
        shape, dtype = list(array.shape), str(array.dtype)
        variable = variables.get(name)
        if variable is None:
            return {"shape": shape, "dtype": dtype}
        return {
            "shape": shape,
            "dtype": dtype,
            "layer_dims": layer_dims(variable),
            "random": is_random(variable),
        }

    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "mesh": dict(mesh.shape) if isinstance(mesh, Mesh) else {},
        "processes": jax.process_count(),
        "metrics": dict(metrics),
        "config": dict(config),
        "stacks": stack_paths(state),
        "arrays": {name: entry(name, array) for name, array in arrays.items()},
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that write checkpoints."""
    return {"jshard": __version__, **formatting.versions(_PACKAGES)}


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the description of a step, on the disk when this returns."""
    replace_file(folder / FILE, json.dumps(content, indent=1, default=str))


def read(folder: Path) -> dict[str, Any]:
    """Reads the description of a step.

    Raises:
      UserError: it cannot be read, or is no description of a checkpoint.
    """
    try:
        about = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except OSError as error:
        why = f"{FILE} cannot be read ({error.strerror})"
    except ValueError as error:
        why = f"{FILE} is no JSON ({error})"
    else:
        if _is_description(about):
            return about
        why = f"{FILE} describes no checkpoint"
    raise UserError(f"checkpoint {folder} is damaged: {why}")


def _is_description(about: Any) -> bool:
    dicts = ("versions", "mesh", "metrics", "config", "arrays")
    return (
        isinstance(about, dict)
        and about.keys() >= {"step", "created", "processes"}
        and all(isinstance(about.get(key), dict) for key in dicts)
        and all(
            isinstance(array, dict)
            and isinstance(array.get("dtype"), str)
            and isinstance(array.get("shape"), list)
            for array in about["arrays"].values()
        )
    )
