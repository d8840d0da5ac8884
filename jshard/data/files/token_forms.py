"""What a file of tokens is: by its own header, or by the one of an index beside it.

Raw integers, as nanoGPT writes them, have neither, and are of the dtype that is said.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.system.errors import UserError

DTYPES = ("uint16", "uint32", "int32", "int64")
# llm.c's header: int32 magic, version and number of tokens, and zeros.
MAGIC = {"uint16": 20240520, "uint32": 20240801}
HEADER_BYTES = 1024
_NUMPY = b"\x93NUMPY"
# Megatron-LM's index: magic, version, code of the dtype, numbers of sequences and of
# documents' bounds; lengths (int32) and places (int64) of sequences, bounds (int64).
_MEGATRON = b"MMIDIDX\x00\x00"
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BOUNDS = struct.Struct("<QBQQ")
# How files begin that have the suffix, too, and are none of tokens.
_OTHERS = {
    b"PK\x03\x04": "a ZIP archive, as PyTorch's are",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "a pickle of PyTorch",
    b"GGUF": "a model in GGUF",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"version https://git-lfs": "a pointer of Git LFS: run git lfs pull",
}
_SAMPLED = 2**14  # tokens, at the begin, the middle and the end
_SAMPLED_LEAST = 16


class TokenForm(NamedTuple):
    """Where the tokens of a file are, and where its documents end.

    Attributes:
      dtype: Of the tokens, with the order of bytes.
      offset: The first byte.
      length: The number of tokens.
      ends: Returns the token after the last of each document, [documents]; None if the
        file and a foreign index say nothing of that.
    """

    dtype: np.dtype
    offset: int
    length: int
    ends: Callable[[], np.ndarray] | None = None


def is_token_array(file: Path) -> bool:
    """Whether a .npy file has one dimension of integers."""
    return file.suffix.lower() == ".npy" and _array_form(file) is not None


def token_form(file: Path, token_dtype: str, index: Path) -> TokenForm:
    """Returns what a file of tokens is.

    Args:
      file: The file.
      token_dtype: What raw integers are.
      index: The file beside it that may be Megatron's.

    Raises:
      UserError: It is none of tokens, is empty or damaged, or has another dtype.
      OSError: It cannot be read.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        begin = stream.read(32)
    if not size:
        raise _empty(file)
    if begin.startswith(_NUMPY):
        form = _array_form(file)
        if form is None or size < form.offset + form.length * form.dtype.itemsize:
            raise UserError(
                f"{file}: is not one whole dimension of integers; save tokens by "
                "np.save(file, tokens) with tokens.ndim == 1"
            )
    elif (what := _other_kind(file, begin, size)) or file.suffix.lower() == ".npy":
        raise UserError(
            f"{file}: holds no tokens but {what or 'no header of NumPy'}; move it out "
            "of data.path, or write tokens by python -m jshard.tokenize"
        )
    elif index.exists() and _begins(index, _MEGATRON):
        form = _of_megatron(file, size, index)
    else:
        form = _llm_c_or_raw(file, size, begin, token_dtype)
    if not form.length:
        raise _empty(file)
    return form


def _llm_c_or_raw(file: Path, size: int, begin: bytes, token_dtype: str) -> TokenForm:
    header = np.frombuffer(begin[:12].ljust(12, b"\0"), "<i4")
    dtype, offset = np.dtype(token_dtype).newbyteorder("<"), 0
    named = {magic: dtype for dtype, magic in MAGIC.items()}
    if (wanted := named.get(int(header[0]))) is not None:
        offset = HEADER_BYTES
        expected = offset + int(header[2]) * dtype.itemsize
        if wanted != token_dtype or header[2] < 0 or size != expected:
            raise UserError(
                f"{file}: its header says {header[2]} tokens of {wanted}, which does "
                f"not match {size} bytes of {token_dtype}; set data.token_dtype, or "
                "download the file again"
            )
    length, rest = divmod(size - offset, dtype.itemsize)
    if rest:
        raise UserError(
            f"{file}: {size} bytes are not a multiple of {token_dtype}'s "
            f"{dtype.itemsize}; set data.token_dtype, or download the file again"
        )
    if not offset and _is_wider(np.memmap(file, dtype, "r", shape=(length,))):
        raise UserError(
            f"{file}: nearly every second token is 0 or 1 as {token_dtype}, as in a "
            "file of wider integers: set data.token_dtype to one of "
            f"{', '.join(DTYPES)}"
        )
    return TokenForm(dtype, offset, length)


def _is_wider(tokens: np.ndarray) -> bool:
    """Whether these seem to be the halves of wider integers below 2**18."""
    starts = {0, len(tokens) // 4 * 2, max(len(tokens) - _SAMPLED, 0) // 2 * 2}
    sample = np.concatenate([tokens[i : i + _SAMPLED] for i in sorted(starts)])
    if len(tokens) < _SAMPLED_LEAST:
        return False
    parts = [sample[first : len(sample) // 2 * 2 : 2] for first in (0, 1)]
    low, high = (float(np.mean((part >= 0) & (part < 4))) for part in parts)
    return high >= 0.99 and low < 0.9


def _array_form(file: Path) -> TokenForm | None:
    """Returns what a file of NumPy is; None unless one dimension of integers."""
    read: Any = {1: np.lib.format.read_array_header_1_0}
    read |= {2: np.lib.format.read_array_header_2_0}
    try:
        with file.open("rb") as stream:
            major, _ = np.lib.format.read_magic(stream)
            shape, _, dtype = read[major](stream)
            offset = stream.tell()
    except (ValueError, KeyError):
        return None
    if len(shape) != 1 or dtype.kind not in "iu":
        return None
    return TokenForm(dtype, offset, shape[0])


def _of_megatron(file: Path, size: int, index: Path) -> TokenForm:
    damaged = UserError(
        f"{index}: is an index of Megatron-LM that does not fit the {size} bytes of "
        f"{file.name}; copy both again"
    )
    data = np.memmap(index, np.uint8, "r")
    first = len(_MEGATRON) + _BOUNDS.size
    if len(data) < first:
        raise damaged
    head = data[len(_MEGATRON) : first].tobytes()
    version, code, sequences, bounds = _BOUNDS.unpack(head)
    if version != 1 or code not in _CODES:
        raise UserError(
            f"{index}: is of Megatron-LM, version {version}, with tokens of code "
            f"{code}; integers of version 1 are read"
        )
    dtype = np.dtype(_CODES[code]).newbyteorder("<")
    if len(data) < first + 12 * sequences + 8 * bounds:
        raise damaged
    lengths = np.frombuffer(data, "<i4", sequences, first)
    places = np.frombuffer(data, "<i8", sequences, first + 4 * sequences)
    documents = np.frombuffer(data, "<i8", bounds, first + 12 * sequences)
    stops = np.cumsum(lengths, dtype=np.int64)
    total = int(stops[-1]) if sequences else 0
    fits = total * dtype.itemsize == size and (lengths >= 0).all()
    fits = fits and np.array_equal(places, (stops - lengths) * dtype.itemsize)
    if not fits or not ((documents >= 0) & (documents <= sequences)).all():
        raise damaged
    ends = np.append(0, stops)[documents]
    ends = np.unique(np.append(ends[ends > 0], total))
    return TokenForm(dtype, 0, total, lambda: ends)


def _other_kind(file: Path, begin: bytes, size: int) -> str:
    """Returns what a file is that is none of tokens, or ""."""
    for magic, what in _OTHERS.items():
        if begin.startswith(magic):
            return what
    # LitData's chunk: uint32 number of items, where each begins, and where all end.
    items = int.from_bytes(begin[:4], "little")
    if size >= 4 * (items + 2) and begin[4:8] == (4 * (items + 2)).to_bytes(
        4, "little"
    ):
        with file.open("rb") as stream:
            stream.seek(4 * (items + 1))
            if int.from_bytes(stream.read(4), "little") == size:
                return "a chunk of LitData"
    return ""


def _begins(file: Path, magic: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _empty(file: Path) -> UserError:
    return UserError(f"{file}: the file is empty; remove it, or download it again")
