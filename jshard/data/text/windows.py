"""Windows of T consecutive tokens, and the tokens that they read."""

import bisect
import itertools
from collections.abc import Sequence

import grain
import numpy as np

from jshard.data.text.token_files import Piece
from jshard.system.errors import UserError

_SAMPLE = 4096  # tokens of each file to check before the first step


def windows(
    pieces: Sequence[Piece], T: int, *, pad: bool, vocab_size: int | None
) -> grain.MapDataset:
    """Returns the windows of consecutive tokens; `pad` keeps an incomplete last one."""
    *starts, num_tokens = itertools.accumulate(map(len, pieces), initial=0)

    def window(index: int) -> dict[str, np.ndarray]:
        start = position = index * T
        stop = min(start + T + 1, num_tokens)
        number = bisect.bisect_right(starts, start) - 1
        tokens = np.zeros(T + 1, np.int32)
        while position < stop:
            offset = starts[number]
            found = read_tokens(
                pieces[number], position - offset, stop - offset, vocab_size
            )
            tokens[position - start :][: len(found)] = found
            position += len(found)
            number += 1
        weights = np.zeros(T, np.float32)
        weights[: stop - start - 1] = 1
        return {"inputs": tokens[:-1], "targets": tokens[1:].copy(), "weights": weights}

    check_sample(pieces, vocab_size)
    count, rest = divmod(num_tokens - 1, T)
    return grain.MapDataset.range(count + (pad and rest > 0)).map(window)


def check_sample(pieces: Sequence[Piece], vocab_size: int | None) -> None:
    """Reads the first tokens of each piece; UserError for one beyond the vocabulary."""
    for piece in pieces:
        read_tokens(piece, 0, _SAMPLE, vocab_size)


def read_tokens(
    piece: Piece, start: int, stop: int, vocab_size: int | None
) -> np.ndarray:
    """Returns tokens [start, stop) of a piece; UserError for one of `vocab_size` on."""
    limit = 2**31 if vocab_size is None else vocab_size  # tokens become int32
    tokens = piece.read(start, stop)
    if tokens.min() < 0:
        at = int(tokens.argmin())
        raise UserError(
            f"{piece.file}: token {tokens[at]} at position "
            f"{piece.start + start + at} is negative; check data.token_dtype, or write "
            "the file without such padding"
        )
    if tokens.max() >= limit:
        at = int(tokens.argmax())
        raise UserError(
            f"{piece.file}: token {tokens[at]} at position "
            f"{piece.start + start + at} is not below the vocabulary size {limit}; "
            "raise the model's vocab_size, or check data.token_dtype"
        )
    return tokens
