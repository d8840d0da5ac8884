"""The loss of a bigram model of tokens, as a reference for the evaluation's."""

from collections.abc import Sequence

import numpy as np

from jshard.data.text.corpus import split_corpus
from jshard.data.text.token_files import Piece, is_of_tokens
from jshard.data.tokenizers.tokenizer import BYTE_VOCAB, load_tokenizer

_CHUNK = 1 << 20  # tokens counted at a time
_MOST = 4096  # tokens of a vocabulary; there are as many pairs as its square


def bigram_reference(
    path: str,
    *,
    validation_fraction: float,
    token_dtype: str,
    targets: int | None,
    text_key: str = "text",
    tokenizer: str = "",
) -> dict[str, float]:
    """Returns {"bigram model": loss} of a text, for a recipe's `references`.

    Args:
      path: The corpus, as for `text_data`, like the next two.
      validation_fraction: See `path`.
      token_dtype: See `path`.
      targets: How many held-out tokens to evaluate; None for all.
      text_key: See `path`.
      tokenizer: See `path`.

    Returns:
      `bigram_loss` of the validation split given the training split. Nothing for
      large vocabularies and `.bin` files, which have too many pairs.
    """
    loaded = load_tokenizer(tokenizer)
    if loaded.vocab_size > _MOST:
        return {}
    splits = split_corpus(
        path,
        validation_fraction=validation_fraction,
        token_dtype=token_dtype,
        text_key=text_key,
        tokenizer=loaded,
    )
    if any(is_of_tokens(piece.file) for piece in splits["train"]):
        return {}
    train = count_pairs(splits["train"], vocab_size=loaded.vocab_size)
    held_out = count_pairs(splits["validation"], targets, loaded.vocab_size)
    return {"bigram model": bigram_loss(train, held_out)}


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the cross-entropy of held-out text in a bigram model, in nats per token.

    Both arguments are pair counts from `count_pairs`; a ValueError if one has none.
    """
    if not train.any() or not held_out.any():
        raise ValueError("no pair of tokens to count")
    log_p = np.log(bigram_probabilities(train))
    return -float(np.sum(held_out * log_p) / np.sum(held_out))


def bigram_probabilities(counts: np.ndarray) -> np.ndarray:
    """Returns p(b|a) at [a, b], float64[V, V], from counts of pairs.

    Interpolated with lower orders after Witten and Bell (1991, "The zero-frequency
    problem", method C; see Chen and Goodman 1999, "An empirical study of smoothing
    techniques for language modeling"). If c(a) tokens follow a, of T(a) different
    values, and c(a,b) of them are b, then

        p(b|a) = (c(a,b) + T(a) p(b)) / (c(a) + T(a))

    where p(b) is computed alike from all tokens, with 1/V as its lower order, so that
    no pair is impossible.
    """
    size = len(counts)
    single = _interpolate(counts.sum(axis=0), np.full(size, 1 / size))
    return np.stack([_interpolate(row, single) for row in counts])


def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    if not counts.any():
        return lower
    kinds = np.count_nonzero(counts)
    return (counts + kinds * lower) / (counts.sum() + kinds)


def count_pairs(
    pieces: Sequence[Piece], most: int | None = None, vocab_size: int = BYTE_VOCAB
) -> np.ndarray:
    """Counts how often each token follows each, in the first `most` pairs or in all.

    Returns int64[V, V]. Pairs span pieces.
    """
    counts = np.zeros(vocab_size**2, np.int64)
    left = sum(map(len, pieces)) if most is None else most
    last = np.zeros(0, np.int64)
    for piece in pieces:
        for start in range(0, len(piece), _CHUNK):
            data = np.append(last, piece.read(start, start + _CHUNK))[: left + 1]
            pairs = data[:-1] * vocab_size + data[1:]
            counts += np.bincount(pairs, minlength=vocab_size**2)
            left, last = left - len(pairs), data[-1:]
    return counts.reshape(vocab_size, vocab_size)
