"""A checkpoint's metadata: its arrays, library versions, mesh and config.

What a checkpoint's ``description.json`` says is checked before anything relies on it.
"""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from operator import ge
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jshard.nn.adapted import ALPHA, LAYERS, STABILIZED
from jshard.sharding.layout.four_bit.base import FOUR_BIT, four_bit_of
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.padding import exact_types
from jshard.sharding.layout.values.random_streams import is_random
from jshard.sharding.layout.variables import array_name, is_variable
from jshard.sharding.settings.state import TrainState
from jshard.sharding.units.modules import Stack
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.system.cli.paths import path_problem
from jshard.system.compat.versions import versions
from jshard.system.errors import UserError, some_of, warn
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import read_json

FILE = "description.json"
FROZEN_FROM = "frozen_from"  # where the parameters are that the checkpoint leaves out
BITS = "bits"  # the hash of an array's bits, as the devices had it
STORED_SHAPE = "stored_shape"  # of an array that is stored with its padding

_DICTS = ("versions", "mesh", "metrics", "config", "arrays")
_DTYPE = re.compile(
    r"bool|u?int\d{1,2}|b?float(16|32|64)|float[48]_\w+|complex(64|128)|key<\w*>"
)
_OF_MODEL = ("params", "frozen", "model_state")  # their arrays are of Flax's variables
_MOST_BYTES = 2**63 - 1  # of an array
_MOST_DIMS = 32
_MOST_LAYERS = 2**20  # of all arrays together; each layer is a tensor in an export


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
                if (layers := variable.get_metadata(LAYERS, None)) is not None:
                    described[name][LAYERS] = list(layers)
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


def check_wanted(
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
            f"checkpoint {shown(folder)} is of another model or optimizer: "
            f"{some_of(problems, '; ')}"
        )
    for (stored_dtype, dtype), count in casts.items():
        warn(
            f"{count} arrays of checkpoint {shown(folder)} are read as {dtype}, "
            f"saved as {stored_dtype}"
        )


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element; those of a random key are two numbers.

    Raises:
      ValueError: There is no such dtype.
    """
    if _DTYPE.fullmatch(dtype) is None:
        raise ValueError("no dtype of an array")
    if dtype.startswith("key<"):
        return 8
    try:
        return jnp.dtype(dtype).itemsize
    except TypeError as error:
        raise ValueError("no dtype of an array") from error


def checked(content: Any) -> dict[str, Any]:
    """Returns the content of a description, with its metrics as floats.

    Raises:
      ValueError: It describes no checkpoint; the message says why.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    for key in ("step", "processes"):
        _expect(type(content.get(key)) is int, f"{key} is not a whole number")
    _expect(isinstance(content.get("created"), str), "created is not a text")
    for key in _DICTS:
        _expect(isinstance(content.get(key), dict), f"{key} is not a JSON object")
    stacks = content.get("stacks")
    are_names = isinstance(stacks, list) and all(isinstance(x, str) for x in stacks)
    _expect(are_names, "stacks is not a list of names")
    layers = sum(map(_layers, content["arrays"], content["arrays"].values()))
    _expect(layers <= _MOST_LAYERS, f"its arrays have {layers:,} layers")
    if FROZEN_FROM in content:
        _check_frozen(content[FROZEN_FROM])
    metrics = {name: _number(name, x) for name, x in content["metrics"].items()}
    return content | {"metrics": metrics}


def _expect(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


def _layers(name: str, array: Any) -> int:
    """Checks the entry of an array; returns how many layers of Stacks it holds."""

    def expect(fine: bool, problem: str) -> None:
        _expect(fine, f"array {name!r} has {problem}")

    _expect(isinstance(array, dict), f"array {name!r} is not a JSON object")
    expect(_is_unicode(name), "half a character in its name")
    shape, dtype = array.get("shape"), array.get("dtype")
    sizes = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    expect(sizes and len(shape) <= _MOST_DIMS, f"shape {_shortened(shape)}")
    padded = array.get(STORED_SHAPE, shape)
    fits = isinstance(padded, list) and len(padded) == len(shape)
    fits = fits and all(type(n) is int for n in padded) and all(map(ge, padded, shape))
    expect(fits, f"{STORED_SHAPE} {_shortened(padded)}")
    try:
        size = itemsize(dtype if isinstance(dtype, str) else "")
    except ValueError:
        size = 0
    expect(size > 0, f"dtype {_shortened(dtype)}")
    total = math.prod(padded) * size
    expect(total <= _MOST_BYTES, f"shape {_shortened(shape)}: too many bytes")
    of_model = name.partition(".")[0] in _OF_MODEL
    known = not of_model or {"layer_dims", "random"} <= array.keys()
    expect(known, "no layer_dims or random")
    layer_dims = array.get("layer_dims", 0)
    fits = type(layer_dims) is int and 0 <= layer_dims <= len(shape)
    expect(fits, f"layer_dims {_shortened(layer_dims)}")
    random, alpha = array.get("random", False), array.get(ALPHA)
    expect(isinstance(random, bool), f"random {_shortened(random)}")
    if alpha is not None:
        _number(f"{name}.{ALPHA}", alpha)
    bits = array.get(BITS, "")
    expect(isinstance(bits, str), f"{BITS} {_shortened(bits)}")
    stabilized = array.get(STABILIZED)
    expect(stabilized in (None, False, True), f"{STABILIZED} {_shortened(stabilized)}")
    if (layers := array.get(LAYERS)) is not None:
        fits = isinstance(layers, list) and all(type(n) is int for n in layers)
        expect(fits and layer_dims == 1, f"{LAYERS} {_shortened(layers)}")
    return math.prod(shape[:layer_dims]) if layer_dims else 0


def _check_frozen(entry: Any) -> None:
    _expect(isinstance(entry, dict), f"{FROZEN_FROM} is not a JSON object")
    path, sums = entry.get("path"), entry.get("bit_sums")
    if not isinstance(path, str) or not path or not _is_unicode(path):
        raise ValueError(f"{FROZEN_FROM} has no path")
    if problem := path_problem(path, bucket=True, hub=True):
        raise ValueError(f"the path of {FROZEN_FROM} {problem}")
    fine = isinstance(sums, dict) and all(
        isinstance(x, str) and len(x.split()) == 2 for x in sums.values()
    )
    _expect(fine, f"{FROZEN_FROM} has no sums of bits")


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} is {_shortened(value)}, no number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is {_shortened(value)}, no number") from error


def _is_unicode(text: str) -> bool:
    """Returns whether a text from JSON, which can hold half a character, has none."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
