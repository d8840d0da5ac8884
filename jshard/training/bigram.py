"""The loss of a model of pairs of bytes, to stand beside the evaluation's."""

from collections.abc import Sequence

import numpy as np

from jshard.training.data.corpus import Piece, split_corpus

_BYTES = 256
_CHUNK = 1 << 20  # bytes counted at a time


def bigram_reference(
    path: str, *, validation_fraction: float, token_dtype: str, targets: int | None
) -> dict[str, float]:
    """Returns what a recipe's `references` shows for text: {"bigram model": loss}.

    Args:
      path: Of the corpus, as for `text_data`, with the next two.
      validation_fraction: See `path`.
      token_dtype: See `path`.
      targets: So many tokens are evaluated, the first ones held out; None is all.

    Returns:
      `bigram_loss` of the validation split after the training split, or nothing where
      tokens are not bytes of text: of others there are too many pairs.
    """
    splits = split_corpus(
        path, validation_fraction=validation_fraction, token_dtype=token_dtype
    )
    if any(piece.file.suffix == ".bin" for piece in splits["train"]):
        return {}
    held_out = count_pairs(splits["validation"], targets)
    return {"bigram model": bigram_loss(count_pairs(splits["train"]), held_out)}


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the cross-entropy of held-out bytes in a bigram model of training text.

    Args:
      train: Numbers of pairs, [256, 256], as `count_pairs` makes.
      held_out: The same, of the text to predict.

    Returns:
      Nats per byte.

    Raises:
      ValueError: There is no pair in one of them.
    """
    if not train.any() or not held_out.any():
        raise ValueError("no pair of bytes to count")
    log_p = np.log(bigram_probabilities(train))
    return -float(np.sum(held_out * log_p) / np.sum(held_out))


def bigram_probabilities(counts: np.ndarray) -> np.ndarray:
    """Returns p(b|a) at [a, b], float64[256, 256], from the numbers of pairs.

    It is interpolated with lower orders after Witten and Bell (1991, "The zero-
    frequency problem", method C; see Chen and Goodman 1999, "An empirical study of
    smoothing techniques for language modeling"): of c(a) bytes that follow a, c(a,b)
    are b, and they are of T(a) kinds. Then

        p(b|a) = (c(a,b) + T(a) p(b)) / (c(a) + T(a))

    and p(b) likewise of all bytes, with 1/256 below it, so that no pair is impossible.
    """
    single = _interpolate(counts.sum(axis=0), np.full(_BYTES, 1 / _BYTES))
    return np.stack([_interpolate(row, single) for row in counts])


def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """A distribution from counts [256] and the one of a lower order."""
    if not counts.any():
        return lower
    kinds = np.count_nonzero(counts)
    return (counts + kinds * lower) / (counts.sum() + kinds)


def count_pairs(pieces: Sequence[Piece], most: int | None = None) -> np.ndarray:
    """Returns how often each byte follows each, int64[256, 256].

    Args:
      pieces: Of bytes; a piece's first follows the last of the piece before.
      most: Count the first so many pairs; None is all.
    """
    counts = np.zeros(_BYTES**2, np.int64)
    left = sum(map(len, pieces)) if most is None else most
    last = np.zeros(0, np.uint8)
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK):
            data = np.append(last, piece.read(start, start + _CHUNK))[: left + 1]
            pairs = data[:-1].astype(np.int64) * _BYTES + data[1:]
            counts += np.bincount(pairs, minlength=_BYTES**2)
            left, last = left - len(pairs), data[-1:]
    return counts.reshape(_BYTES, _BYTES)
