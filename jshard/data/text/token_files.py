"""Files of tokens, as a corpus reads them: memory-mapped, with what lies beside them.

`train.bin` holds little-endian integers, perhaps after a header (see `token_form`).
`train.idx` beside it holds the token after the last of each document in uint64,
and `train.trained` a byte for each token: 1 if it is a target.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jshard.data.files.token_forms import HEADER_BYTES, MAGIC, token_form
from jshard.data.files.walk import reading
from jshard.system.errors import UserError

TOKENS, ENDS, TRAINED = ".bin", ".idx", ".trained"  # suffixes


def is_of_tokens(file: Path) -> bool:
    """Whether a file is one of tokens, by its suffix."""
    return file.suffix.lower() in (TOKENS, ".npy")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a file.

    Attributes:
      file: The file.
      name: Its path in the corpus' folder, with "/".
      start: The first token.
      stop: The token after the last.
      load: Returns all tokens of the file, integers [n]. Opens memory maps
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
    header[:3] = MAGIC[dtype], 1, tokens
    return header.tobytes()


def map_tokens(file: Path, name: str, token_dtype: str) -> Piece:
    """Returns the tokens of a `.bin` or `.npy` file.

    `name` is its path in the corpus' folder.

    Raises:
      UserError: The file is empty or cannot be read as such tokens, or what lies beside
        it does not fit it.
    """
    index = file.with_suffix(ENDS)
    with reading(file):
        dtype, offset, length, ends = token_form(file, token_dtype, index)
    load = functools.partial(_memmap, file, dtype, offset, length)
    if ends is None and index.exists():
        count, rest = divmod(index.stat().st_size, 8)
        ends = functools.partial(_memmap, index, np.dtype("<u8"), 0, count)
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
        trained = functools.partial(_memmap, mask, np.dtype(bool), 0, length)
    return Piece(file, name, 0, length, load, ends, trained)


@functools.lru_cache(maxsize=256)
def _memmap(file: Path, dtype: np.dtype, offset: int, length: int) -> np.ndarray:
    return np.memmap(file, dtype, "r", offset, (length,))
