"""A prompt and what continues it, as tokens, the way TRL counts them."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from jshard.data.tokenizers.tokenizer import Tokenizer


def common(one: Iterable[Any], other: Iterable[Any]) -> int:
    """Returns how many items both begin with."""
    both = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def with_end(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Returns tokens, int32[n], with the end of a document, if they lack it."""
    end = tokenizer.eos_id
    if end is None or tokens[-1:].tolist() == [end]:
        return tokens
    return np.append(tokens, np.int32(end))
