"""Reads safetensors files into sharded arrays."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from jshard.checkpoint import metadata
from jshard.checkpoint.safetensors_write import INDEX, SINGLE
from jshard.checkpoint.tensor_names import Layers, tensor_names
from jshard.errors import UserError, some_of
from jshard.state import TrainState


def is_safetensors(path: Path) -> bool:
    """Returns whether ``path`` is for ``load_safetensors`` to read."""
    return path.suffix == ".safetensors" or any(
        (path / name).exists() for name in (INDEX, SINGLE)
    )


def load_safetensors(path: Path, abstract: TrainState) -> dict[str, jax.Array]:
    """Reads a model that ``jshard.export`` wrote, onto any mesh.

    That is its parameters, trained or frozen, and the floating-point arrays of its
    other state. The host holds one device's shard of one array at a time.

    Args:
      path: A folder with ``model.safetensors.index.json`` or ``model.safetensors``, or
        one file.
      abstract: The state that the arrays are for: its shapes, floating-point dtypes and
        shardings.

    Returns:
      The arrays by their names in the state, for ``metadata.replace_arrays``.

    Raises:
      UserError: Files are missing or damaged, or their tensors are not exactly those of
        the model; the message lists the first differences.
    """
    with _opened(path) as found:
        wanted = _wanted(abstract, found)
        _check(path, wanted.values(), found)
        return {name: _load(*leaf, found) for name, leaf in wanted.items()}


def check_safetensors(path: Path, abstract: TrainState) -> None:
    """Raises what ``load_safetensors`` would raise, without reading any values."""
    with _opened(path) as found:
        _check(path, _wanted(abstract, found).values(), found)


def _wanted(
    abstract: TrainState, found: Mapping[str, Any]
) -> dict[str, tuple[Any, Layers]]:
    """Returns the arrays to read with the names of their tensors, by array name.

    Adapters that the files have not are left out: they keep their initial values.
    """
    names = tensor_names(metadata.describe(abstract, config={}, metrics={}))
    variables = metadata.variables_by_name(abstract)
    arrays = metadata.arrays_by_name(abstract)
    return {
        name: (x, names[name])
        for name, x in arrays.items()
        if name in names
        and not (
            isinstance(variables.get(name), nnx.LoRAParam)
            and found.keys().isdisjoint(names[name].values())
        )
    }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """Yields a lazily read slice of each tensor, by name."""
    with contextlib.ExitStack() as stack:
        found = {}
        for file in _files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="np"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot read {file}: {error}") from error
            found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield found


def _files(path: Path) -> list[Path]:
    """Returns the files of a model; raises UserError if there are none."""
    index = path / INDEX
    if index.exists():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [path / file for file in sorted(set(files.values()))]
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise UserError(f"cannot read {index}: {error!r}") from error
    file = path / SINGLE if path.is_dir() else path
    if not file.exists():
        raise UserError(f"there is no {file}" + f" and no {INDEX}" * path.is_dir())
    return [file]


def _check(
    path: Path,
    wanted: Iterable[tuple[jax.ShapeDtypeStruct, Layers]],
    found: Mapping[str, Any],
) -> None:
    """Raises UserError unless the tensors are exactly those of the model."""
    expected = {
        name: (list(array.shape[len(index) :]), array.dtype)
        for array, layers in wanted
        for index, name in layers.items()
    }
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} is not in the model" for name in found if name not in expected
    ]
    for name in (name for name in expected if name in found):
        shape, dtype = expected[name]
        found_shape, found_dtype = found[name].get_shape(), found[name].get_dtype()
        if found_shape != shape:
            problems.append(f"{name} has shape {found_shape}, not {shape}")
        elif ("F" in found_dtype) != jnp.issubdtype(dtype, jnp.floating):
            problems.append(f"{name} has dtype {found_dtype}, not {dtype}")
    if problems:
        raise UserError(f"{path} is of another model: {some_of(problems, '; ')}")


def _load(
    array: jax.ShapeDtypeStruct, layers: Layers, found: Mapping[str, Any]
) -> jax.Array:
    """Reads one array from the tensors of its layers."""
    layer_dims = len(next(iter(layers)))

    def read(index: Any) -> np.ndarray:
        bounds = [s.indices(n) for s, n in zip(index, array.shape, strict=True)]
        values = np.empty([stop - start for start, stop, _ in bounds], array.dtype)
        for position in np.ndindex(values.shape[:layer_dims]):
            layer = tuple(bounds[i][0] + p for i, p in enumerate(position))
            values[position] = found[layers[layer]][index[layer_dims:]]  # casts
        return values

    # jax.make_array_from_callback would hold the shards of all devices on the host.
    sharding = array.sharding
    shards = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        place = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.block_until_ready(jax.device_put(read(index), place)))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
