"""The arrays of a checkpoint: writing, matching with those of a state, reading."""

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from flax import nnx
from orbax.checkpoint import v1 as ocp

from jshard.sharding.layout.values.random_streams import is_random
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.array_bits import check_bits
from jshard.storage.checkpoint.buckets import arrays as bucket
from jshard.storage.checkpoint.metadata import STORED_SHAPE
from jshard.system.compat.orbax import database, open_array, open_in_database
from jshard.system.errors import UserError, some_of

ARRAYS = "state"  # Orbax's folder in a step's folder
INDEX = "cache_pool#index"  # TensorStore's cache of where a database has its chunks
_CONTEXT = {**bucket.CONTEXT, INDEX: {"total_bytes_limit": 100_000_000}}
_CHUNK = 256 << 20  # bytes; who reads a part of a chunk reads all of it
_FILE = 256 << 20  # bytes; processes and threads divide the files to verify them


def start_saving(
    folder: Path, arrays: Mapping[str, Any], described: Mapping[str, Any]
) -> Any:
    """Starts to write arrays; returns Orbax's response, whose ``result`` waits.

    Args:
      folder: The folder of the step.
      arrays: Nested dicts, as their names with dots are divided.
      described: What the metadata says of each, by name.
    """
    with _saving_context(described):
        return ocp.save_async(folder / ARRAYS, arrays)


def _saving_context(described: Mapping[str, Any]) -> ocp.Context:
    """Returns Orbax's options for saving arrays, given their metadata by name."""
    storage = ocp.options.ArrayOptions.Saving.StorageOptions

    def bounded(path: Any, array: jax.Array) -> Any:
        shard = np.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if not array.ndim or shard <= _CHUNK:
            return None  # the shard is one chunk, written without a copy
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # A Stack is split into single layers, whatever their size, so that each can be
        # read without the others.
        axes = (0,) if described[name].get("layer_dims") else None
        return storage(chunk_byte_size=_CHUNK, shard_axes=axes)

    context = ocp.Context()
    context.array.saving.scoped_storage_options_creator = bounded
    # Compression saves a tenth and makes saving take seven times as long.
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = _FILE
    # Replicas divide the writing of large arrays only; for small ones it is slower.
    context.array.saving.min_slice_bytes_for_replica_parallel = 1 << 20
    context.asynchronous.create_directories_asynchronously = False
    return context


Named = dict[str, tuple[str, Any]]


def match_parameters(
    folder: Path, state: TrainState, optimizer: bool
) -> tuple[Named, Named]:
    """Finds the arrays that ``load_parameters`` reads, and their sources.

    Adapters (``nnx.LoRAParam``) that the checkpoint lacks are left out.

    Args:
      folder: A step's folder.
      state: Concrete or abstract.
      optimizer: Whether to find the optimizer state and the averages as well.

    Returns:
      The arrays of the state as (name, array) and those of the checkpoint as (stored
      name, metadata), both by a name that is the same whether a parameter is trained
      or frozen.
    """
    stored = metadata.read(folder)["arrays"]
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
    random = {name for name, entry in stored.items() if entry.get("random")}
    sources = selected(stored, random)
    new = {
        key
        for key, (name, _) in targets.items()
        if isinstance(variables.get(name), nnx.LoRAParam) and key not in sources
    }
    return {key: leaf for key, leaf in targets.items() if key not in new}, sources


def load_parameters(
    folder: Path,
    state: TrainState,
    *,
    optimizer: bool = False,
    only: str | tuple[str, ...] = "",
) -> dict[str, jax.Array]:
    """Reads what ``match_parameters`` finds; each device its shards.

    Args:
      folder: A step's folder.
      state: Concrete or abstract. Concrete arrays are deleted just before theirs are
        read.
      optimizer: As for ``match_parameters``.
      only: How the names of the arrays begin; "" for all.

    Returns:
      The arrays by their names in the state.
    """
    targets, sources = match_parameters(folder, state, optimizer)
    wanted, stored_as = {}, {}
    for key, (name, array) in targets.items():
        if name.startswith(only):
            stored_as[name] = sources[key][0]
            wanted[stored_as[name]] = jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=array.sharding
            )
            if isinstance(array, jax.Array):
                array.delete()
    loaded = load_checked(folder, wanted, dict(sources.values()))
    return {name: loaded[stored] for name, stored in stored_as.items()}


def open_stored(folder: Path, about: Mapping[str, Any], name: str, context: Any) -> Any:
    """Opens an array of a step, to be read chunk by chunk.

    Raises:
      UserError: The step has no such array, or not as its description says.
    """
    described = about["arrays"][name]
    try:
        if (step := bucket.address(folder)) is not None:
            store = open_in_database(bucket.database(step), name, context)
        else:
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


def load(folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the ``wanted`` arrays by their stored names; each device its shards.

    Args:
      folder: A step's folder.
      wanted: Shape, dtype and sharding by name. What is beyond the stored shape is
        zeros, as padding: there may be more or less of it.

    Raises:
      UserError: Arrays have no sharding, or what is stored of them is damaged.
    """
    if bare := [name for name, array in wanted.items() if array.sharding is None]:
        raise UserError(
            f"{some_of(bare)}: no sharding to read it with; FSDP.abstract_state has one"
        )
    if (step := bucket.address(folder)) is not None:
        with bucket.explained_reads(step):
            return _load(bucket.database(step), wanted, 512 << 20)
    stored = database(folder / ARRAYS) | {"cache_pool": INDEX}
    return read_specs(folder, _zarr3(stored, wanted), wanted)


def load_checked(
    folder: Path, wanted: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> dict[str, jax.Array]:
    """Reads like ``load``, and compares the bits on the devices with ``stored``.

    Raises:
      UserError: As ``load`` and ``check_bits``.
    """
    loaded = load(folder, wanted)
    again = lambda name: load(folder, {name: wanted[name]})[name]
    check_bits(folder, loaded, stored, again)
    return loaded


def _zarr3(stored: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns TensorStore's specs of arrays of a database, by name."""
    return {
        name: {"driver": "zarr3", "kvstore": {**stored, "path": f"{name}/"}}
        for name in names
    }


def read_specs(
    folder: Path, specs: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads arrays of a folder like ``load``, by TensorStore's specs of them."""
    with _told(folder):
        return _load_opened(_open(specs), wanted, 128 << 20)


def open_specs(folder: Path, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Opens arrays of a folder by TensorStore's specs of them, for a look.

    Raises:
      UserError: An array is missing, or its metadata is damaged.
    """
    with _told(folder):
        return {name: array.result() for name, array in _open(specs).items()}


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raises UserError for errors of TensorStore."""
    if (step := bucket.in_bucket(folder)) is not None:
        with bucket.explained_reads(step):
            yield
        return
    try:
        yield
    except ValueError as error:  # for metadata that is no array's
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {folder} is damaged: {reason}") from error


def _open(specs: Mapping[str, Any], context: Any = None) -> dict[str, Any]:
    """Starts to open arrays, which share a context."""
    context = context or tensorstore.Context(_CONTEXT)
    return {
        name: tensorstore.open(
            spec, read=True, context=context, recheck_cached_metadata=False
        )
        for name, spec in specs.items()
    }


def _load(
    stored: dict[str, Any], wanted: Mapping[str, Any], at_once: int
) -> dict[str, jax.Array]:
    """Reads arrays of a database, whose spec has its context."""
    context = tensorstore.Context(stored.pop("context"))  # all share one
    return _load_opened(_open(_zarr3(stored, wanted), context), wanted, at_once)


def _load_opened(
    opened: Mapping[str, Any], wanted: Mapping[str, Any], at_once: int
) -> dict[str, jax.Array]:
    """Reads arrays that are being opened, some bytes at a time, each shard once."""
    reads: collections.deque[tuple[str, _Reads]] = collections.deque()
    loaded: dict[str, jax.Array] = {}

    def load_next() -> None:
        name, shards = reads.popleft()
        for _, read in shards.values():
            read.result()
        values = {ranges: out for ranges, (out, _) in shards.items()}
        loaded[name] = _on_devices(wanted[name], values)

    for name, array in wanted.items():
        reads.append((name, _read(opened[name].result(), array)))
        while len(reads) > 1 and sum(map(_bytes, reads)) > at_once:
            load_next()
    while reads:
        load_next()
    return {name: loaded[name] for name in wanted}


_Reads = dict[Any, tuple[np.ndarray, Any]]


def _bytes(reads: tuple[str, _Reads]) -> int:
    return sum(out.nbytes for out, _ in reads[1].values())


def _read(stored: Any, wanted: Any) -> _Reads:
    """Starts to read this process's shards of an array, by their index."""
    is_key = jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key)
    shape = stored.shape if is_key else wanted.shape
    shards: _Reads = {}
    for index in wanted.sharding.addressable_devices_indices_map(shape).values():
        ranges = tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))
        if ranges in shards:
            continue
        out = np.zeros([end - start for start, end in ranges], stored.dtype.numpy_dtype)
        there = tuple(
            slice(start, max(start, min(end, n)))
            for (start, end), n in zip(ranges, stored.shape, strict=True)
        )
        here = tuple(slice(0, x.stop - x.start) for x in there)
        into = tensorstore.array(out)[here]
        shards[ranges] = out, into.write(stored[there].translate_to[(0,) * out.ndim])
    return shards


def _on_devices(wanted: Any, values: Mapping[Any, np.ndarray]) -> jax.Array:
    """Returns an array of shards, each on its device and in its memory."""
    is_key = jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key)
    shape = wanted.shape
    if is_key:
        shape += next(iter(values.values())).shape[-1:]
    else:
        values = {i: x.astype(wanted.dtype, copy=False) for i, x in values.items()}

    def shard(index: Any) -> np.ndarray:
        ranges = (x.indices(n)[:2] for x, n in zip(index, shape, strict=True))
        return values[tuple(ranges)]

    array = jax.make_array_from_callback(shape, wanted.sharding, shard)
    return jax.random.wrap_key_data(array) if is_key else array
