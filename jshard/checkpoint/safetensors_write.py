"""Writes safetensors files piece by piece: a tensor is never whole in memory.

A file is an 8-byte length, a JSON header of that length with each tensor's dtype,
shape and byte range, and the bytes. The ``safetensors`` package writes a file from
tensors that are all in memory, so this does without it.
"""

import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}

Tensors = Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes go."""

    file: Path
    offset: int
    tensor: jax.ShapeDtypeStruct


class SafetensorsWriter:
    """Files of a known layout, named as Hugging Face does, filled in any order.

    Args:
      folder: where they go; it has to be there.
      tensors: all of them, of dtypes in ``DTYPES``.
      shard_bytes: the most bytes of tensors in one file; a larger tensor has a file of
        its own.
    """

    def __init__(self, folder: Path, tensors: Tensors, shard_bytes: int):
        self._places: dict[str, _Place] = {}
        self._files: list[Path] = []
        shards = _split(tensors, shard_bytes)
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._start(folder / (name if len(shards) > 1 else SINGLE), shard)
        if len(shards) > 1:
            self._write_index(folder / INDEX)

    def _start(self, file: Path, tensors: Tensors) -> None:
        """Writes the header of a file, and makes it as long as it will be."""
        header: dict[str, Any] = {"__metadata__": {"format": "flax"}}
        end = 0
        # Wide elements first, so that all are aligned.
        for name in sorted(tensors, key=lambda n: -tensors[n].dtype.itemsize):
            begin, end = end, end + nbytes(tensors[name])
            header[name] = {
                "dtype": DTYPES[tensors[name].dtype.name],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(start + end)
        self._files.append(file)
        for name, tensor in tensors.items():
            offset = start + header[name]["data_offsets"][0]
            self._places[name] = _Place(file, offset, tensor)

    def _write_index(self, file: Path) -> None:
        total = sum(nbytes(place.tensor) for place in self._places.values())
        files = {name: place.file.name for name, place in self._places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self._files.append(file)

    def write(self, name: str, start: tuple[int, ...], values: np.ndarray) -> None:
        """Writes a box of a tensor.

        Args:
          name: of the tensor.
          start: the box's first index.
          values: of the tensor's rank; cast to its dtype.

        Raises:
          OSError: the disk is full, or cannot be written.
        """
        place = self._places[name]
        dtype = place.tensor.dtype
        values = np.ascontiguousarray(values, dtype).reshape(values.shape)
        with place.file.open("r+b") as stream:
            for first, run in _runs(values, start, place.tensor.shape):
                stream.seek(place.offset + first * dtype.itemsize)
                stream.write(run.reshape(-1).view(np.uint8).data)

    def sync(self) -> None:
        """Waits until all is on the disk."""
        for file in self._files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def nbytes(tensor: jax.ShapeDtypeStruct) -> int:
    """The bytes of a tensor."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _split(tensors: Tensors, shard_bytes: int) -> list[Tensors]:
    """Fills files up in the natural order of names: layer 2 before layer 10."""
    shards: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = 0
    for name in sorted(tensors, key=_natural):
        if shards[-1] and size + nbytes(tensors[name]) > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += nbytes(tensors[name])
    return list(shards)


def _natural(name: str) -> str:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _runs(
    values: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """The parts of a box that are contiguous in its tensor, with their first element.

    Args:
      values: the box, contiguous.
      start: its first index.
      shape: of the tensor.
    """
    split = values.ndim  # dimensions from here on are whole
    while split and values.shape[split - 1] == shape[split - 1]:
        split -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    for index in np.ndindex(*values.shape[: max(split - 1, 0)]):
        here = [*index, *[0] * (len(shape) - len(index))]
        terms = zip(start, here, strides, strict=True)
        yield sum((s + i) * stride for s, i, stride in terms), values[index]
