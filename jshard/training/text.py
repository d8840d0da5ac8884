"""Text as windows of tokens, byte by byte or tokenized beforehand."""

import bisect
import itertools
from collections.abc import Sequence

import grain
import numpy as np

from jshard.errors import UserError
from jshard.training.data.corpus import Piece, split_corpus

BYTE_VOCAB = 256
_SAMPLE = 4096  # tokens of each file checked before the first step


def text_data(
    path: str,
    split: str,
    *,
    sequence_length: int,
    seed: int,
    validation_fraction: float = 0.05,
    token_dtype: str = "uint16",
    vocab_size: int | None = None,
) -> grain.MapDataset:
    """Returns windows of T = sequence_length tokens, of the text at `path`.

    `path` is one of:

    - "": the source of the running Python's standard library, without its tests and
      tables: 8 MiB or so, nothing to download. Tokens are bytes.
    - A text file, or a folder of them (recursively, in sorted order; hidden files and
      those that are not UTF-8 are left out). Tokens are bytes, held in memory. In a
      folder every file is followed by one zero byte, which text does not contain.
    - A `.bin` file of unsigned little-endian integers, or a folder that has such files
      (then nothing else in it counts). They are memory-mapped; the header of llm.c's
      files is skipped.

    Held out for validation are, in a folder, the files with "val", "valid" or
    "validation" as a word in their path, if there are any. Else, of a folder of text,
    files picked by a hash of their path below it, `validation_fraction` of them; of a
    single file or of `.bin` files, the last `validation_fraction` of their tokens.

    Windows take T+1 tokens from every T-th position on, across files: the last target
    of one is the first input of the next. What is left at the end of the training
    split is dropped; in the validation split it is padded, with weights 0.

    Args:
      path: See above.
      split: "train", shuffled and infinite, each epoch in an order of its own; or
        "validation", finite and in order.
      sequence_length: T, in tokens.
      seed: Of the order of the training split, in [0, 2**32).
      validation_fraction: In [0, 1); 0 holds nothing out but files named so.
      token_dtype: "uint16" or "uint32", of `.bin` files.
      vocab_size: Refuse tokens that are not below it: at once in a sample of every
        file, in the rest when they are read. None allows all.

    Returns:
      A dataset of {"inputs": int32[T], "targets": int32[T], "weights": float32[T]}.

    Raises:
      UserError: `path` cannot be read as text or tokens, there are fewer tokens than a
        window takes, a token is not below `vocab_size`, or another argument is wrong.
    """
    if split not in ("train", "validation"):
        raise UserError(f"split {split!r} is unknown: use 'train' or 'validation'")
    if token_dtype not in ("uint16", "uint32"):
        raise UserError(
            f"data.token_dtype {token_dtype!r} is unknown: use 'uint16' or 'uint32'"
        )
    if sequence_length < 1:
        raise UserError(f"sequence_length={sequence_length}: use 1 token or more")
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"data.validation_fraction={validation_fraction}: use a number in [0, 1)"
        )
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: use a number in [0, 2**32)")
    pieces = split_corpus(
        path, validation_fraction=validation_fraction, token_dtype=token_dtype
    )[split]
    training = split == "train"
    num_tokens = sum(map(len, pieces))
    needed = sequence_length + 1 if training else 2
    if num_tokens < needed:
        raise UserError(
            f"{path or 'built-in text'}: the {split} split has {num_tokens} tokens, "
            f"and needs {needed} with sequence_length={sequence_length}; give more "
            "text, shorten sequence_length or change data.validation_fraction"
        )
    windows = Windows(pieces, sequence_length, pad=not training, vocab_size=vocab_size)
    dataset = grain.MapDataset.source(windows)
    if not training:
        return dataset
    # Not .shuffle(seed): epoch e of that has the order of epoch 0 with seed + e.
    return dataset.seed(seed).shuffle().repeat()


class Windows:
    """Random access to the windows of T+1 tokens of a sequence of pieces.

    Args:
      pieces: The tokens, in order.
      sequence_length: T.
      pad: Keep the last, partial window, padded with zeros of weight 0.
      vocab_size: See `text_data`; a sample is checked here.

    Raises:
      UserError: A token is not below `vocab_size`; here, or when it is read.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        sequence_length: int,
        *,
        pad: bool,
        vocab_size: int | None,
    ):
        *self._starts, self._num_tokens = itertools.accumulate(
            map(len, pieces), initial=0
        )
        self._pieces = pieces
        self._sequence_length = sequence_length
        self._pad = pad
        self._vocab_size = vocab_size
        for piece in pieces:
            self._read(piece, 0, _SAMPLE)

    def __len__(self) -> int:
        num_targets = self._num_tokens - 1
        if self._pad:
            return -(-num_targets // self._sequence_length)
        return num_targets // self._sequence_length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        T = self._sequence_length
        start = index * T
        stop = min(start + T + 1, self._num_tokens)
        window = np.zeros(T + 1, np.int32)
        number = bisect.bisect_right(self._starts, start) - 1
        position = start
        while position < stop:
            offset = self._starts[number]
            tokens = self._read(self._pieces[number], position - offset, stop - offset)
            window[position - start :][: len(tokens)] = tokens
            position += len(tokens)
            number += 1
        weights = np.zeros(T, np.float32)
        weights[: stop - start - 1] = 1
        return {"inputs": window[:-1], "targets": window[1:].copy(), "weights": weights}

    def _read(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        tokens = piece.read(start, stop)
        # Without a vocabulary size, still what int32 can hold.
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        if tokens.max() >= limit:
            at = int(tokens.argmax())
            raise UserError(
                f"{piece.file}: token {tokens[at]} at position "
                f"{piece.start + start + at} is not below the vocabulary size {limit}; "
                "raise the model's vocab_size, or check data.token_dtype"
            )
        return tokens


def encode(text: str) -> np.ndarray:
    """Returns the UTF-8 bytes of `text` as tokens, int32[n]."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """Returns the text of byte tokens [n], with � where they are not UTF-8.

    Raises:
      ValueError: A token is not a byte.
    """
    return bytes(np.asarray(tokens).tolist()).decode(errors="replace")
