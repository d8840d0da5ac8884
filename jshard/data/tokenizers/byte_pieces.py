"""Tokens that need no library: bytes, and a small vocabulary of pieces of text."""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

# Words, of which tokens are parts: a line end with the next line's indentation; letters
# or marks with the space before them; a digit; any other byte.
WORD = re.compile(rb"\n *| ?[A-Za-z]+| +|[0-9]| ?[^\sA-Za-z0-9]+|[\x00-\xff]")
BYTES = [bytes([byte]) for byte in range(256)]
PYTHON = "python_pieces.json"  # beside this file; benchmarks/pieces.py makes it


class ByteTokenizer:
    """Tokens are the bytes of UTF-8; a zero byte, which no text has, ends a document.

    Attributes:
      vocab_size: All tokens are below it.
      dtype: An unsigned one that holds them.
      digest: Differs between tokenizers whose files differ.
      bos_id: Begins a document; None if nothing does. Here None.
      eos_id: Ends a document; None if nothing does. Here 0.
      stop_ids: Tokens that end a generated text; here 0 alone.
    """

    vocab_size = len(BYTES)
    dtype = np.dtype(np.uint8)
    digest = "bytes"
    bos_id: int | None = None
    eos_id: int | None = 0
    stop_ids: tuple[int, ...] = (0,)
    _texts = BYTES

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Returns the tokens of a prompt, int32[n]; none of them are special."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of whole documents, [n] of `dtype`, each with its end."""
        return [self.encode(text + "\0").astype(self.dtype) for text in texts]

    def decode(self, tokens: np.ndarray, *, special: bool = False) -> str:
        """Returns the text of tokens [n], with � for bytes that are not UTF-8.

        Tokens of a model with a larger vocabulary are written as numbers.
        """
        if np.max(tokens, initial=0) < self.vocab_size:
            found = b"".join(self._texts[token] for token in tokens)
            return found.decode(errors="replace")
        return " ".join(map(str, tokens))


class PieceTokenizer(ByteTokenizer):
    """Tokens are bytes and frequent pieces of words; a zero byte ends a document.

    A word becomes the longest piece that it begins with, and so on with its rest.

    Args:
      pieces: Strings of several bytes, which are the tokens from 256 on.

    The attributes are those of `ByteTokenizer`.
    """

    dtype = np.dtype(np.uint16)
    stop_ids: tuple[int, ...] = ()

    def __init__(self, pieces: Sequence[bytes]):
        self._texts = [*BYTES, *pieces]
        self._ids = {text: token for token, text in enumerate(self._texts)}
        self._longest = max(map(len, self._texts))
        self._tokens_of = functools.lru_cache(maxsize=2**17)(self._spell)
        self.vocab_size = len(self._texts)
        self.digest = hashlib.sha256(b"\n".join(self._texts)).hexdigest()

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Returns the tokens of a prompt, int32[n]; none of them are special."""
        words = WORD.findall(text.encode())
        return np.fromiter(chain.from_iterable(map(self._tokens_of, words)), np.int32)

    def share_of_bytes(self, tokens: np.ndarray) -> float:
        """Returns which part of a text, in bytes, its tokens [n] spell byte by byte."""
        single = np.count_nonzero(tokens < len(BYTES))
        return single / max(sum(len(self._texts[token]) for token in tokens), 1)

    def _spell(self, word: bytes) -> tuple[int, ...]:
        tokens, start = [], 0
        while start < len(word):
            stop = min(start + self._longest, len(word))
            while word[start:stop] not in self._ids:
                stop -= 1
            tokens.append(self._ids[word[start:stop]])
            start = stop
        return tuple(tokens)


def python_pieces() -> PieceTokenizer:
    """Returns the tokenizer of Python's source code: 1024 tokens of 2.6 bytes each."""
    pieces = json.loads(Path(__file__).with_name(PYTHON).read_text())
    return PieceTokenizer([piece.encode("latin-1") for piece in pieces])
