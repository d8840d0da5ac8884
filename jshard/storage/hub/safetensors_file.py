"""Reads the tensors of safetensors files: a header, then slices through mmap.

The library checks the files. Its own slices (0.8) lack float8 in NumPy, and arrays
without elements.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jshard.storage.hub.quantised import fp8, mxfp4
from jshard.storage.hub.safetensors_write import INDEX, SINGLE
from jshard.system.errors import UserError, warn
from jshard.system.files.untrusted import (
    POINTER,
    is_pointer,
    parse_json,
    path_inside,
    read_json,
)

FP8 = "F8_E4M3"
DTYPES: dict[str, Any] = {
    "BOOL": bool,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    FP8: jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    offset: int  # the place of its first byte there
    shape: tuple[int, ...]
    dtype: str  # its dtype, as the format calls it: "BF16"

    def open(self) -> np.ndarray:
        """Maps the tensor into memory; only what is used of it is read.

        The pages that were read count as this process's memory as long as the array
        exists, so that it should be short-lived.
        """
        return np.memmap(
            self.file, DTYPES[self.dtype], "r", offset=self.offset, shape=self.shape
        )


class QuantisedTensor(NamedTuple):
    """A tensor that is decoded where it is read."""

    codes: StoredTensor  # its codes
    scales: StoredTensor  # their scales
    decoded: Callable[[np.ndarray, np.ndarray], Any]  # of both, with slices to read
    shape: tuple[int, ...]  # its shape
    dtype: str  # what it is decoded to

    def open(self) -> Any:
        """Maps the tensor into memory; slices of it are read and decoded."""
        return self.decoded(self.codes.open(), self.scales.open())


Stored = StoredTensor | QuantisedTensor


def join_quantised(found: Mapping[str, StoredTensor]) -> dict[str, Stored]:
    """Replaces codes and scales, in MXFP4 and in FP8, by the tensors they stand for."""
    joined: dict[str, Stored] = dict(found)
    for name, codes in found.items():
        whole = name.removesuffix("_blocks")
        blocks = whole != name
        scale = f"{whole}_scales" if blocks else name + fp8.SCALE
        if scale not in found:
            continue
        tensor = (_in_mxfp4 if blocks else _in_fp8)(codes, found[scale])
        if tensor is not None:
            del joined[name], joined[scale]
            joined[whole] = tensor
    return joined


def _in_mxfp4(codes: StoredTensor, scales: StoredTensor) -> QuantisedTensor | None:
    if {codes.dtype, scales.dtype} != {"U8"}:
        return None
    shape = mxfp4.decoded_shape(codes.shape, scales.shape)
    if shape is None:
        return None
    return QuantisedTensor(codes, scales, mxfp4.Decoded, shape, "BF16")


def _in_fp8(codes: StoredTensor, scales: StoredTensor) -> QuantisedTensor | None:
    if codes.dtype != FP8 or scales.dtype not in ("F32", "BF16"):
        return None
    if not fp8.is_scaled(codes.shape, scales.shape):
        return None
    return QuantisedTensor(codes, scales, fp8.Decoded, codes.shape, "F32")


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a folder or a file, by name, reading the headers alone.

    Raises:
      UserError: A file is missing, truncated or not in the format.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(path):
        try:
            if not file.is_file():  # a pipe or a device may never end
                raise OSError("no file" if file.exists() else "it does not exist")
            if is_pointer(file):
                raise ValueError(POINTER)
            with safe_open(file, framework="np"):
                pass  # it checks the header, and the file's size against it
            found |= _read_header(file)
        except (OSError, ValueError, SafetensorError) as error:
            why = " ".join(str(error).split())  # it may quote line ends of the file
            raise UserError(f"cannot read {file}: {why}") from error
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            file,
            8 + length + tensor["data_offsets"][0],
            tuple(tensor["shape"]),
            tensor["dtype"],
        )
        for name, tensor in header.items()
    }


def weight_files(folder: Path) -> list[str]:
    """Returns the names of a model's files: the single one, or those of its index.

    Where a folder has both, the single file is the model, as for transformers: it was
    saved over a model in several files.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        return [SINGLE]
    try:
        files = sorted(set(read_json(index)["weight_map"].values()))
        for file in files:
            path_inside(folder, file)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        if single.exists():
            return [SINGLE]
        raise UserError(f"cannot read {index}: {error!r}") from error
    if files != [SINGLE] and single.exists():
        warn(
            f"{folder} holds {SINGLE}, which is read, and an {INDEX} of other files, "
            "which are not"
        )
        return [SINGLE]
    return files


def _files(path: Path) -> list[Path]:
    """Returns the files of a model; raises UserError if there are none."""
    if (path / INDEX).exists():
        # Links are followed: Hugging Face's cache consists of them.
        return [path_inside(path, file) for file in weight_files(path)]
    file = path / SINGLE if path.is_dir() else path
    if not file.exists():
        raise UserError(f"there is no {file}" + f" and no {INDEX}" * path.is_dir())
    return [file]
