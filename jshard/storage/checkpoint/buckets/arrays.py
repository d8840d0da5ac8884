"""The arrays of a checkpoint in a bucket, written and read by TensorStore.

Orbax renames folders and cannot write to S3. The format is the one that it has on a
disk: an OCDBT database of Zarr 3 arrays, in which each process writes its shards to a
database of its own, and process 0 merges their indices. Every chunk has a CRC-32C,
which TensorStore verifies when it reads the chunk.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import add
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.buckets.objects import (
    CONTEXT,
    BucketError,
    Objects,
    explained,
)
from jshard.storage.checkpoint.buckets.orbax_mirror import in_bucket
from jshard.system.errors import UserError

ADDRESS = ".bucket"  # a file in a local step's folder: the URL of its arrays
ARRAYS = "state/"
_CHUNK = 32 << 20  # bytes; who reads a part of a chunk reads all of it
_OBJECT = 256 << 20  # bytes of an object with chunks of many arrays
_AT_ONCE = 512 << 20  # bytes that are encoded at a time

Shards = dict[str, tuple[dict[str, Any], list[tuple[Any, np.ndarray]]]]


# Writing.


def on_host(arrays: Mapping[str, jax.Array]) -> Shards:
    """Brings this process's shards to the host, so that the arrays may be donated.

    On CPUs without a copy: JAX does not donate what NumPy has a view of, but copies it.

    Returns:
      By name, the array's Zarr metadata, and the indices and values of the shards that
      this process writes: replicas are written once.
    """
    plain = {name: _without_key(array) for name, array in arrays.items()}
    shards = {
        name: [x for x in array.addressable_shards if x.replica_id == 0]
        for name, array in plain.items()
    }
    for own in shards.values():
        for shard in own:
            shard.data.copy_to_host_async()
    return {
        name: (_zarr(plain[name]), [(x.index, _fetched(x.data)) for x in own])
        for name, own in shards.items()
    }


def _without_key(array: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _fetched(array: jax.Array) -> np.ndarray:
    # Whether a view of a GPU's memory on the host is safe from donation, nobody says.
    seen = array.sharding.memory_kind != "device" and jax.default_backend() != "cpu"
    return np.array(array) if seen else np.asarray(array)


def _zarr(array: jax.Array) -> dict[str, Any]:
    chunk = list(array.sharding.shard_shape(array.shape))
    for axis in range(len(chunk)):
        while math.prod(chunk) * array.dtype.itemsize > _CHUNK and chunk[axis] > 1:
            chunk[axis] //= _smallest_factor(chunk[axis])
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": grid,
        "codecs": [little, {"name": "crc32c"}],
    }


def _smallest_factor(number: int) -> int:
    factors = (x for x in range(2, math.isqrt(number) + 1) if number % x == 0)
    return next(factors, number)


def write(step: Objects, shards: Shards, process: int, count: int) -> None:
    """Writes a process's shards below the step's URL, and waits for the server.

    Process 0 describes all arrays; ``merge`` comes when every process has written.
    """
    store = _database(step, _part(process, count)) | {
        "target_data_file_size": _OBJECT,
        "assume_config": True,
        "config": _DATABASE,
    }
    context = tensorstore.Context(_CONTEXT)
    for group in _groups(shards):
        with explained(step.url):
            transaction, writes = tensorstore.Transaction(), []
            for name in group:
                described, own = shards[name]
                if not own and process:
                    continue
                array = tensorstore.open(
                    {
                        "driver": "zarr3",
                        "kvstore": store | {"path": f"{name}/"},
                        "metadata": described,
                        "store_data_equal_to_fill_value": True,
                    },
                    open=True,
                    create=True,
                    assume_metadata=process > 0,
                    context=context,
                    transaction=transaction,
                ).result()
                writes += [
                    array[index].write(
                        values, can_reference_source_data_indefinitely=True
                    )
                    for index, values in own
                ]
            for one in writes:
                one.result()
            transaction.commit_async().result()


def _groups(shards: Shards) -> Iterator[list[str]]:
    """Divides the names, so that the shards of a group are about ``_AT_ONCE`` bytes."""
    group, size = [], 0
    for name, (_, own) in shards.items():
        group.append(name)
        size += sum(values.nbytes for _, values in own)
        if size >= _AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def merge(step: Objects, count: int) -> None:
    """Merges the indices of all processes' databases; no values are read."""
    if count == 1:
        return
    with explained(step.url):
        context = tensorstore.Context(_CONTEXT)
        merged = tensorstore.KvStore.open(
            _database(step, ARRAYS) | {"assume_config": True, "config": _DATABASE},
            context=context,
        ).result()
        transaction = tensorstore.Transaction(atomic=True)
        copies = [
            tensorstore.KvStore.open(
                _database(step, _part(process, count)), context=context
            )
            .result()
            .experimental_copy_range_to(merged.with_transaction(transaction))
            for process in range(count)
        ]
        for copy in copies:
            copy.result()
        transaction.commit_async().result()


def objects_of(step: Objects, process: int, count: int) -> dict[str, str]:
    """Returns the generations of what a process wrote, by path.

    A listing that lacked one would leave it unverified, no more.
    """
    return step.generations(step.paths(_part(process, count)))


def merged_objects(step: Objects, count: int) -> dict[str, str]:
    """Returns the generations of what ``merge`` wrote, by path."""
    paths = step.paths(ARRAYS) if count > 1 else []
    return step.generations(x for x in paths if not x.startswith(f"{ARRAYS}process_"))


def _part(process: int, count: int) -> str:
    return ARRAYS if count == 1 else f"{ARRAYS}process_{process}/"


_DATABASE = {  # as Orbax has it
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}


def _database(step: Objects, path: str) -> dict[str, Any]:
    pool = "cache_pool#ocdbt"
    return {"driver": "ocdbt", "base": step.spec(path), "cache_pool": pool}


_CONTEXT = {**CONTEXT, "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}}


# Reading.


def address(folder: Path) -> Objects | None:
    """Returns where the arrays of a local step's folder are; None if in it."""
    file = folder / ADDRESS
    return Objects(file.read_text(encoding="utf-8")) if file.exists() else None


def find_damage(folder: Path, index: int, count: int) -> list[str]:
    """Compares one process's share of a step's objects with the manifest.

    Their values are verified as they are read.

    Args:
      folder: The local folder of the step.
      index: Which share.
      count: The number of shares.
    """
    step = address(folder)
    if step is None:
        return []
    try:
        arrays = manifest.read_arrays(folder)
    except manifest.ManifestError as error:
        return [str(error)]
    share = dict(sorted(arrays["objects"].items())[index::count])
    with explained_reads(step):
        return step.changed(share, moved=arrays["url"] != step.url)


def verify_values(step: Objects, names: Iterable[str]) -> None:
    """Reads all chunks of a step's arrays, which verifies their checksums.

    Raises:
      UserError: A chunk is damaged, or cannot be read.
    """
    stored = database(step)
    context = tensorstore.Context(stored.pop("context"))
    with explained_reads(step):
        for name in names:
            array = tensorstore.open(
                {"driver": "zarr3", "kvstore": stored | {"path": f"{name}/"}},
                read=True,
                context=context,
            ).result()
            chunk: Any = array.chunk_layout.read_chunk.shape or ()  # None of a scalar
            starts = (range(0, n, c) for n, c in zip(array.shape, chunk, strict=True))
            for corner in itertools.product(*starts):
                ends = map(min, map(add, corner, chunk), array.shape)
                array[tuple(map(slice, corner, ends))].read().result()


def shown(folder: Path) -> str:
    """Returns what to call a folder: for a local copy, the URL."""
    step = address(folder) or in_bucket(folder)
    return step.url if step else str(folder)


def database(step: Objects) -> dict[str, Any]:
    """Returns the database of a step's arrays; chunks that adjoin are read at once."""
    return _database(step, ARRAYS) | {
        "context": _CONTEXT,
        "experimental_read_coalescing_threshold_bytes": 1 << 20,
        "experimental_read_coalescing_merged_bytes": 64 << 20,
        "experimental_read_coalescing_interval": "1ms",
    }


@contextlib.contextmanager
def explained_reads(step: Objects) -> Iterator[None]:
    """Says in one line why a step's arrays cannot be read.

    Raises:
      UserError: A chunk is damaged, or cannot be read.
    """
    try:
        with explained(step.url):
            yield
    except BucketError as error:
        cause = str(error.__cause__)
        if re.search(r"checksum|CRC-32C|corrupt|DATA_LOSS", cause):
            raise UserError(
                f"checkpoint {step.url} is damaged: an array of it has another checksum"
            ) from error
        if re.search("NOT_FOUND|NoSuchKey", cause):
            raise UserError(
                f"cannot read checkpoint {step.url}: objects of it are gone; if a run "
                "saves there, it has deleted it meanwhile: try again"
            ) from error
        raise UserError(
            f"cannot read checkpoint {step.url}: {error.strerror}"
        ) from error
