"""Files of tokens, as a corpus reads them: memory-mapped, with what lies beside them.

`train.bin` holds unsigned little-endian integers, perhaps after the header of llm.c's
files. `train.idx` beside it holds the token after the last of each document in uint64,
and `train.trained` a byte for each token: 1 if it is a target.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jshard.errors import UserError

TOKENS, ENDS, TRAINED = ".bin", ".idx", ".trained"  # suffixes
# llm.c's header: int32 magic, version and number of tokens, and zeros.
_MAGIC = {"uint16": 20240520, "uint32": 20240801}
HEADER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a file.

    Attributes:
      file: The file.
      name: Its path in the corpus' folder, with "/".
      start: The first token.
      stop: The token after the last.
      load: Returns all tokens of the file, unsigned integers [n]. Opens memory maps
        when called, because the open maps of a thousand files would use up the file
        descriptors.
      ends: Returns the token after the last of each document of the file, integers
        [documents]. None if the file is one document, or if that of `.bin` is unknown.
      trained: Returns which tokens of the file are targets, bool[n]; None for all.
    """

    file: Path
    name: str
    start: int
    stop: int
    load: Callable[[], np.ndarray]
    ends: Callable[[], np.ndarray] | None = None
    trained: Callable[[], np.ndarray] | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the piece, clipped at its end."""
        return self.load()[self.start + start : min(self.start + stop, self.stop)]

    def read_weights(self, start: int, stop: int) -> np.ndarray | float:
        """Returns the weights of tokens [start, stop) as targets: 0 or 1."""
        if self.trained is None:
            return 1.0
        return self.trained()[self.start + start : min(self.start + stop, self.stop)]


def make_header(dtype: str, tokens: int) -> bytes:
    """Returns llm.c's header of a file of tokens."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = _MAGIC[dtype], 1, tokens
    return header.tobytes()


def map_tokens(file: Path, name: str, token_dtype: str) -> Piece:
    """Returns the tokens of a `.bin` file.

    `name` is its path in the corpus' folder.

    Raises:
      UserError: The file is empty or cannot be read as such tokens, or what lies beside
        it does not fit it.
    """
    itemsize = np.dtype(token_dtype).itemsize
    with reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    offset = 0
    named = {magic: dtype for dtype, magic in _MAGIC.items()}
    if (wanted := named.get(int(header[0]))) is not None:
        offset = HEADER_BYTES
        expected = offset + int(header[2]) * itemsize
        if wanted != token_dtype or header[2] < 0 or size != expected:
            raise UserError(
                f"{file}: its header says {header[2]} tokens of {wanted}, which does "
                f"not match {size} bytes of {token_dtype}; set data.token_dtype, or "
                "download the file again"
            )
    if size == offset:
        raise UserError(f"{file}: the file is empty; remove it, or download it again")
    length, rest = divmod(size - offset, itemsize)
    if rest:
        raise UserError(
            f"{file}: {size} bytes are not a multiple of {token_dtype}'s {itemsize}; "
            "set data.token_dtype, or download the file again"
        )
    load = functools.partial(_memmap, file, token_dtype, offset, length)
    ends = None
    index = file.with_suffix(ENDS)
    if index.exists():
        count, rest = divmod(index.stat().st_size, 8)
        ends = functools.partial(_memmap, index, "uint64", 0, count)
        if rest or not count or ends()[-1] != length:
            raise UserError(
                f"{index}: does not end at the {length} tokens of {file.name}; "
                "tokenize the text again"
            )
    trained, mask = None, file.with_suffix(TRAINED)
    if mask.exists():
        if mask.stat().st_size != length:
            raise UserError(
                f"{mask}: does not have a byte for each of the {length} tokens of "
                f"{file.name}; tokenize the chats again"
            )
        trained = functools.partial(_memmap, mask, "bool", 0, length)
    return Piece(file, name, 0, length, load, ends, trained)


@functools.lru_cache(maxsize=256)
def _memmap(file: Path, dtype: str, offset: int, length: int) -> np.ndarray:
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r", offset, (length,))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror}); make it "
            "readable, or move it out of data.path"
        ) from error
