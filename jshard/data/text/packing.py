"""Packing: documents laid out in rows of T tokens, whole where they fit."""

from collections.abc import Sequence

import grain
import numpy as np

from jshard.data.text.token_files import Piece, is_of_tokens
from jshard.data.text.windows import check_sample, read_tokens
from jshard.system.errors import UserError


def packed_rows(
    pieces: Sequence[Piece], T: int, *, max_segments: int, vocab_size: int | None
) -> grain.MapDataset:
    """Returns rows of whole documents, padded at their end.

    A document of n tokens takes n-1 places: its inputs are the first n-1 tokens, its
    targets the last n-1, so that no target is another document's. One that takes more
    than T is cut into pieces of T places, which count as documents. Rows are filled by
    best fit, the longest documents first (Ding et al. 2024, arXiv:2404.10830), and are
    in the order of their first documents.

    Args:
      pieces: Parts of files with documents.
      T: Places of a row.
      max_segments: The most runs of equal segment ids of a row, padding included; 2 or
        more, or 0 for any number.
      vocab_size: Tokens must be below it, if it is given.

    Returns:
      A dataset of {"inputs": int32[T], "targets": int32[T], "weights": float32[T],
      "segment_ids": int32[T], "positions": int32[T]}: documents are 1, 2, ... and
      padding is 0, with positions from 0 in each. Empty if no document has two tokens.
    """
    check_sample(pieces, vocab_size)
    number, start, length = _spans(pieces, T)
    order, bounds = _rows(best_fit(length, T, max_segments - 1))

    def read(index: int) -> dict[str, np.ndarray]:
        names = ("inputs", "targets", "segment_ids", "positions")
        row: dict[str, np.ndarray] = {name: np.zeros(T, np.int32) for name in names}
        row["weights"] = np.zeros(T, np.float32)
        place = 0
        documents = order[bounds[index] : bounds[index + 1]]
        for segment, document in enumerate(documents.tolist(), start=1):
            piece, size = pieces[int(number[document])], int(length[document])
            first, last = int(start[document]), int(start[document]) + size
            tokens = read_tokens(piece, first, last + 1, vocab_size)
            span = slice(place, place + size)
            row["inputs"][span] = tokens[:-1]
            row["targets"][span] = tokens[1:]
            row["weights"][span] = piece.read_weights(first + 1, last + 1)
            row["segment_ids"][span] = segment
            row["positions"][span] = np.arange(size)
            place += size
        return row

    return grain.MapDataset.range(len(bounds) - 1).map(read)


def best_fit(length: np.ndarray, T: int, most: int = 0) -> np.ndarray:
    """Assigns documents to rows: the longest first, each to the fullest row it fits.

    Args:
      length: Places of each document, integers in [1, T].
      T: Places of a row.
      most: The most documents of a row; 0 or less for any number.

    Returns:
      The row of each document, int64[n].
    """
    row = np.zeros(len(length), np.int64)
    documents: list[int] = []  # of each row
    rows_with: list[list[int]] = [[] for _ in range(T)]  # by free places
    free = 0  # bit i: there is a row with i free places
    for document in np.argsort(-length, kind="stable").tolist():
        size = int(length[document])
        if fits := free >> size:
            places = size + (fits & -fits).bit_length() - 1
            chosen = rows_with[places].pop()
            if not rows_with[places]:
                free ^= 1 << places
        else:
            places, chosen = T, len(documents)
            documents.append(0)
        row[document] = chosen
        documents[chosen] += 1
        left = places - size
        if left and documents[chosen] != most:
            rows_with[left].append(chosen)
            free |= 1 << left
    return row


def _spans(
    pieces: Sequence[Piece], T: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the documents, cut to T places: piece, first token, places, [n] each."""
    numbers, starts, lengths = [], [], []
    for number, piece in enumerate(pieces):
        first, stop = _documents(piece)
        places = np.maximum(stop - first - 1, 0)
        parts = -(-places // T)
        which = np.repeat(np.arange(len(parts)), parts)
        offset = (np.arange(len(which)) - (np.cumsum(parts) - parts)[which]) * T
        numbers.append(np.full(len(which), number, np.int32))
        starts.append(first[which] + offset)
        lengths.append(np.minimum(places[which] - offset, T))
    return np.concatenate(numbers), np.concatenate(starts), np.concatenate(lengths)


def _documents(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """Returns where documents start and stop in a piece, int64[n] each."""
    if piece.ends is None and is_of_tokens(piece.file):
        raise UserError(
            f"{piece.file}: packing needs the ends of documents, a file "
            f"{piece.file.with_suffix('.idx').name} beside it: tokenize the text with "
            "python -m jshard.tokenize, or set data.pack=False"
        )
    ends = np.array([piece.stop]) if piece.ends is None else piece.ends()
    ends = np.clip(ends.astype(np.int64), piece.start, piece.stop) - piece.start
    ends = np.unique(np.append(ends, piece.stop - piece.start))
    ends = ends[ends > 0]
    return np.append(0, ends[:-1]), ends


def _rows(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts documents by row, rows by their first document.

    Returns:
      The documents in order, and where each row begins in them, with the end.
    """
    _, first, which = np.unique(row, return_index=True, return_inverse=True)
    leader = first[which]
    order = np.argsort(leader, kind="stable")
    begins = np.flatnonzero(np.diff(leader[order], prepend=-1))
    return order, np.append(begins, len(row))
