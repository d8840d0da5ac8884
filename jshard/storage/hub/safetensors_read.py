"""Reads safetensors files into sharded arrays, each device its slices."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.sharding.layout.four_bit.base import encode_layers, four_bit_of
from jshard.sharding.layout.four_bit.codes import FourBit
from jshard.sharding.layout.values.transfer import put, put_parts
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import metadata
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.quantised import bitsandbytes, methods
from jshard.storage.hub.quantised.fp8 import SCALE
from jshard.storage.hub.safetensors_file import (
    DTYPES,
    FP8,
    Stored,
    find_tensors,
    join_quantised,
)
from jshard.storage.hub.safetensors_write import INDEX, SINGLE
from jshard.storage.hub.tensor_names import Index, tensor_names
from jshard.system.errors import UserError, some_of

# Where each layer of an array lies in the files; () is an array outside Stacks.
Layers = dict[Index, FileTensor]

_ABSENT = FileTensor(())
# Ends of names in Hugging Face's files that transformers does not read either: buffers
# that follow from the config, the head of a model whose head is the embedding, the
# number of batches in batch statistics, and what a masked language model does not have
# of BERT.
_REDUNDANT = tuple(
    """
    rotary_emb.inv_freq attn.bias attn.masked_bias lm_head.weight num_batches_tracked
    embeddings.position_ids predictions.decoder.weight predictions.decoder.bias
    pooler.dense.weight pooler.dense.bias seq_relationship.weight seq_relationship.bias
    """.split()
)
# What a layer has that predicts further tokens (DeepSeek-V3, GLM 4.5), which
# transformers does not read either.
_OF_FURTHER_TOKENS = "eh_proj.weight"


def is_safetensors(path: Path) -> bool:
    """Returns whether ``path`` is for ``load_safetensors`` to read."""
    return path.suffix == ".safetensors" or any(
        (path / name).exists() for name in (INDEX, SINGLE)
    )


def load_safetensors(
    path: Path,
    state: TrainState,
    tensors: Mapping[str, FileTensor] | None = None,
    *,
    only: str | tuple[str, ...] = "",
) -> dict[str, jax.Array]:
    """Reads a model from files of ``jshard.export`` or of Hugging Face, onto any mesh.

    That is its parameters, trained or frozen, and the floating-point arrays of its
    other state. A process reads only the slices of its own devices, and its host holds
    one device's shard of one array at a time. Weights in 4 bits are encoded while they
    are read, a layer at a time, or come from bitsandbytes' files as they are; the host
    holds all layers of one of them in 4 bits.

    Args:
      path: A folder with ``model.safetensors.index.json`` or ``model.safetensors``, or
        one file.
      state: The state that the arrays are for: its shapes, floating-point dtypes and
        shardings. Concrete arrays are deleted just before theirs are read.
      tensors: Where each array lies in the files, by tensor name without stacking
        ("blocks.3.up.kernel"); by default under that name, as ``jshard.export`` writes.
      only: How the names of the arrays to read begin; "" for all.

    Returns:
      The arrays by their names in the state, for ``metadata.replace_arrays``.

    Raises:
      UserError: Files are missing or damaged, or their tensors are not exactly those of
        the model; the message lists the first differences.
    """
    found, wanted = check_safetensors(path, state, tensors)
    variables = metadata.variables_by_name(state)
    loaded = {}
    for name, array in metadata.arrays_by_name(state).items():
        if name not in wanted or not name.startswith(only):
            continue
        abstract = jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=array.sharding
        )
        if isinstance(array, jax.Array):
            array.delete()
        exact, layers = wanted[name]
        if (four_bit := four_bit_of(variables.get(name))) is not None:
            loaded[name] = put(_in_bits(four_bit, exact, layers, found), abstract)
        else:
            loaded[name] = _load(abstract, exact.shape, layers, found)
    return loaded


def check_safetensors(
    path: Path, state: TrainState, tensors: Mapping[str, FileTensor] | None = None
) -> tuple[dict[str, Stored], dict[str, tuple[Any, Layers]]]:
    """Raises what ``load_safetensors`` would raise, without reading any values.

    Returns:
      The tensors of the files, and what is to be read as ``_wanted`` finds it.
    """
    found = join_quantised(find_tensors(path))
    wanted = _wanted(path, state, found, tensors)
    variables = metadata.variables_by_name(state)
    _check(path, wanted, variables, found, _REDUNDANT if tensors else ())
    return found, wanted


def _wanted(
    path: Path,
    state: TrainState,
    found: Mapping[str, Stored],
    tensors: Mapping[str, FileTensor] | None,
) -> dict[str, tuple[Any, Layers]]:
    """Returns the abstract arrays to read and the places of their layers, by name.

    Adapters that the files have not are left out: they keep their initial values.
    """
    arrays, variables = metadata.exact_by_name(state), metadata.variables_by_name(state)
    wanted: dict[str, tuple[Any, Layers]] = {}
    unknown: list[str] = []
    for name, layers in tensor_names(
        metadata.describe(state, config={}, metrics={})
    ).items():
        new = found.keys().isdisjoint(layers.values())
        if isinstance(variables.get(name), nnx.LoRAParam) and new:
            continue
        if tensors is None:
            places = {index: FileTensor((name,)) for index, name in layers.items()}
        else:
            unknown += [name for name in layers.values() if name not in tensors]
            places = {i: tensors.get(name, _ABSENT) for i, name in layers.items()}
            places = {i: x.named_as_in(found) for i, x in places.items() if x.names}
        if places:
            wanted[name] = _as_read(variables.get(name), arrays[name]), places
    if unknown:
        raise UserError(
            f"the recipe's map of Hugging Face names lacks {some_of(unknown)}: {path} "
            "is of another kind of model"
        )
    return wanted


def _check_quantised(
    path: Path, found: Mapping[str, Stored], known: Container[str]
) -> None:
    """Raises UserError if an unknown tensor is a part of a quantised weight."""
    quantised = methods.parts(name for name in found if name not in known)
    if not quantised:
        return
    said = some_of([*quantised], limit=3)
    weights = (name.removesuffix(".absmax") for name in quantised)
    if kinds := {bitsandbytes.kind_of(name, found) for name in weights} - {""}:
        raise UserError(
            f"{path} has weights in 4 bits ({said}) that the model has not: train "
            f"adapters with --config.policy.precision.base={min(kinds)}, or give the "
            "folder of the unquantised model"
        )
    method = next(iter(quantised.values()))
    raise UserError(f"{path} is quantised ({method}: {said}): {methods.WHAT_WORKS}")


def _as_read(variable: Any, exact: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the abstract array that a variable stands for, which may be in 4 bits."""
    if (four_bit := four_bit_of(variable)) is None:
        return exact
    return jax.ShapeDtypeStruct((*exact.shape[:-1], *four_bit.shape), four_bit.dtype)


def _check(
    path: Path,
    wanted: Mapping[str, tuple[Any, Layers]],
    variables: Mapping[str, nnx.Variable],
    found: Mapping[str, Stored],
    redundant: tuple[str, ...],
) -> None:
    """Raises UserError unless the tensors are exactly those of the model.

    Besides them there may be tensors whose names end like one of ``redundant``.
    """
    in_bits = {
        place: four_bit
        for key, (_, layers) in wanted.items()
        if (four_bit := four_bit_of(variables.get(key))) is not None
        for place in layers.values()
        if bitsandbytes.is_stored(place, found)
    }
    known = {
        name
        for place, four_bit in in_bits.items()
        for weight in place.names
        for kind in [bitsandbytes.kind_of(weight, found) or four_bit.kind]
        for name in bitsandbytes.tensors(weight, kind)
    }
    _check_quantised(path, found, known)
    expected = {
        name: (place.shape_in_file(array.shape[len(index) :]), array.dtype)
        for array, layers in wanted.values()
        for index, place in layers.items()
        if place not in in_bits
        for name in place.names
    }
    further = tuple(
        name.removesuffix(_OF_FURTHER_TOKENS)
        for name in (found if redundant else ())
        if name.endswith(f".{_OF_FURTHER_TOKENS}")
    )
    problems = [bitsandbytes.problem(*one, found) for one in in_bits.items()]
    problems = list(filter(None, problems))
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{name} is not in the model"
        for name in found
        if name not in expected.keys() | known
        and not (name.endswith(redundant) or name.startswith(further))
    ]
    for name in (name for name in expected if name in found):
        shape, dtype = expected[name]
        stored = found[name]
        if redundant and stored.dtype == FP8:
            problems.append(f"{name} is in FP8 and {name}{SCALE} is missing")
            continue
        is_float = stored.dtype.startswith(("F", "BF"))
        if stored.shape != shape:
            problems.append(f"{name} has shape {list(stored.shape)}, not {list(shape)}")
        elif stored.dtype not in DTYPES or is_float != jnp.issubdtype(
            dtype, jnp.floating
        ):
            problems.append(f"{name} has dtype {stored.dtype}, not {dtype}")
    if problems:
        raise UserError(f"{path} is of another model: {some_of(problems, '; ')}")


def _in_bits(
    four_bit: FourBit,
    exact: jax.ShapeDtypeStruct,
    layers: Layers,
    found: Mapping[str, Stored],
) -> np.ndarray:
    """Reads a weight in 4 bits, (*layers, bytes), from either kind of tensors."""
    of_layers = exact.shape[: exact.ndim - len(four_bit.shape)]
    whole = tuple(slice(0, size) for size in four_bit.shape)

    def read(index: tuple[int, ...]) -> np.ndarray:
        slices = (*(slice(i, i + 1) for i in index), *whole)
        return _read(slices, exact.dtype, layers, found).reshape(four_bit.shape)

    first = next(iter(layers.values()))
    if bitsandbytes.is_stored(first, found):
        stored = [
            bitsandbytes.read(place, four_bit.kind, found) for place in layers.values()
        ]
        return np.reshape(stored, (*of_layers, -1))
    return encode_layers(four_bit, of_layers, read)


def _load(
    array: jax.ShapeDtypeStruct,
    exact: tuple[int, ...],
    layers: Layers,
    found: Mapping[str, Stored],
) -> jax.Array:
    """Reads one array from the tensors of its layers; its padding is zeros.

    ``exact`` is its shape without that.
    """

    def part_at(index: tuple[slice, ...]) -> np.ndarray:
        ends = (slice(*s.indices(n)[:2]) for s, n in zip(index, exact, strict=True))
        return _read(tuple(ends), array.dtype, layers, found)

    return put_parts(part_at, array)


def _read(
    index: tuple[slice, ...],
    dtype: Any,
    layers: Layers,
    found: Mapping[str, Stored],
) -> np.ndarray:
    """Reads a slice of an array."""
    layer_dims = len(next(iter(layers)))
    bounds = [(s.start, s.stop) for s in index]
    values = np.empty([stop - start for start, stop in bounds], dtype)
    for position in np.ndindex(values.shape[:layer_dims]):
        layer = tuple(bounds[i][0] + p for i, p in enumerate(position))
        place, one = layers[layer], values[(*position, ...)]
        for part, name, rest in _parts(one, place, index[layer_dims:]):
            tensor = found[name].open()
            part[...] = place.from_file(tensor)[rest]  # casts
    return values


def _parts(
    values: np.ndarray, place: FileTensor, index: tuple[slice, ...]
) -> Iterator[tuple[np.ndarray, str, tuple[slice, ...]]]:
    """Yields the part of ``values`` that each tensor fills, its name and its slice."""
    if len(place.names) == 1:
        yield values, place.names[0], index
        return
    for part, name in zip(values, place.names[index[0]], strict=True):
        yield part, name, index[1:]
