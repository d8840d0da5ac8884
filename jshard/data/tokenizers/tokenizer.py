"""Tokenizers: bytes, pieces, or files of Hugging Face's `tokenizers` library."""

import copy
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard.data.tokenizers.byte_pieces import (
    ByteTokenizer,
    PieceTokenizer,
    python_pieces,
)
from jshard.data.tokenizers.named_tokens import (
    NAMING,
    ROLES,
    name_tokens,
    read_json,
)
from jshard.data.tokenizers.tokenizer_settings import apply_settings
from jshard.storage.hub.online.download import local_path
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError
from jshard.system.files import untrusted

BYTE_VOCAB = ByteTokenizer.vocab_size
PYTHON = "python"  # the name of the pieces that come with jshard
FILE = "tokenizer.json"
_MOST = 2**28  # bytes of it; the largest ones have 40 MB
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
_NUMBERING = ("config.json", "generation_config.json")


class FileTokenizer:
    """A `tokenizer.json`, with what transformers takes from the files beside it.

    The attributes are those of `ByteTokenizer`, and

    Attributes:
      file: The path of tokenizer.json.
      special_tokens: Texts of special tokens by name, like "bos_token", as chat
        templates read them.
      special_ids: Their numbers, by name.
    """

    def __init__(self, file: Path):
        self.file = file
        self._tokenizer = _open(file)
        before = _state(self._tokenizer)
        apply_settings(self._tokenizer, file.parent)
        self.special_tokens = name_tokens(self._tokenizer, file.parent)
        digest = hashlib.sha256(file.read_bytes())
        if (after := _state(self._tokenizer)) != before:
            digest.update(after.encode())
        self.digest = digest.hexdigest()
        self.dtype = np.dtype(np.uint32)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size <= 2**16:
            self.dtype = np.dtype(np.uint16)
        self.special_ids = {
            name: vocabulary[text]
            for name, text in self.special_tokens.items()
            if text in vocabulary
        }
        self._numbers = read_json(file.parent, _NUMBERING)
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.stop_ids = self._stop_ids()
        self._rows: int | None = None

    @property
    def least_vocab_size(self) -> int:
        """The rows that an embedding needs for texts without added tokens."""
        own = self._tokenizer.get_vocab(with_added_tokens=False).values()
        ids = [i for name, i in self.special_ids.items() if name in ROLES]
        return 1 + max((*own, *ids, *self.stop_ids), default=-1)

    def within(self, vocab_size: int) -> "FileTokenizer":
        """Returns this tokenizer for a model that lacks its last added tokens.

        A text that holds one of those is a UserError.
        """
        limited = copy.copy(self)
        limited._rows = vocab_size
        return limited

    def _known(self, ids: list[int]) -> list[int]:
        """Raises UserError for a token that the model lacks."""
        if self._rows is not None and max(ids, default=0) >= self._rows:
            token = max(ids)
            text = self._tokenizer.id_to_token(token)
            raise UserError(
                f"a text holds {text!a}, token {token} of {self.file}, and the model "
                f"has {self._rows} tokens: leave it out, or train a model of more "
                f"(--config.model.vocab_size={self.vocab_size})"
            )
        return ids

    def encode(self, text: str, *, special: bool = True) -> np.ndarray:
        """Returns the tokens of a prompt, int32[n].

        Args:
          text: The prompt.
          special: Add the special tokens that the tokenizer puts around a text, such as
            one that begins it.
        """
        found = self._tokenizer.encode(_whole(text), add_special_tokens=special)
        return np.asarray(self._known(found.ids), np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a text without special ones, and their characters.

        Returns:
          Tokens int32[n], and the first character of each and the one after its last,
          int64[n, 2].
        """
        found = self._tokenizer.encode(_whole(text), add_special_tokens=False)
        offsets = np.asarray(found.offsets, np.int64).reshape(-1, 2)
        return np.asarray(self._known(found.ids), np.int32), offsets

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of whole documents, [n] of `dtype`, on all cores.

        A document begins as a prompt does, and ends with `eos_id` if there is one.
        """
        # No character offsets, which take as long as the rest.
        found = self._tokenizer.encode_batch_fast([_whole(text) for text in texts])
        end = [] if self.eos_id is None else [self.eos_id]
        return [
            np.array(ids if ids[-1:] == end else ids + end, self.dtype)
            for ids in (self._known(document.ids) for document in found)
        ]

    def decode(self, tokens: np.ndarray, *, special: bool = False) -> str:
        """Returns the text of tokens [n], without special ones by default."""
        ids = np.asarray(tokens).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def _special_id(self, name: str) -> int | None:
        """Returns a special token's id, by its text or by its number in config.json."""
        if name in self.special_ids:
            return self.special_ids[name]
        return next(iter(_ids(self.file.parent, self._numbers, f"{name}_id")), None)

    def _stop_ids(self) -> tuple[int, ...]:
        """Returns the ends of a document, and those that a model's config adds."""
        named = []
        for file in _NUMBERING:
            found = read_json(self.file.parent, (file,))
            named += _ids(self.file.parent, found, "eos_token_id")
        return tuple(sorted({i for i in (self.eos_id, *named) if i is not None}))


Tokenizer = ByteTokenizer | PieceTokenizer | FileTokenizer


def _whole(text: str) -> str:
    """Raises UnicodeEncodeError for half a character; the library, a TypeError."""
    text.encode()
    return text


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a file, or of a folder with a `tokenizer.json`.

    Args:
      path: "" for bytes, "python" for pieces of Python; or a name on the Hugging Face
        Hub. Loaded once a process.
      vocab_size: If given, all but bytes must not have more tokens, besides added ones
        that are not to be in a text, such as an image's.

    Raises:
      UserError: `path` holds no tokenizer or a larger one, or the `tokenizers` library
        is missing.
    """
    check_path("data.tokenizer", path, hub=True)
    tokenizer = _load(str(path))
    if path and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        if isinstance(tokenizer, FileTokenizer):
            if tokenizer.least_vocab_size <= vocab_size:
                return _within(tokenizer, vocab_size)
        raise UserError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, more "
            f"than model.vocab_size={vocab_size}; set --config.model.vocab_size="
            f"{tokenizer.vocab_size} or more, or give the model's own tokenizer "
            "(--config.data.tokenizer=, empty, for bytes)"
        )
    return tokenizer


@functools.lru_cache(maxsize=8)
def _within(tokenizer: FileTokenizer, vocab_size: int) -> FileTokenizer:
    return tokenizer.within(vocab_size)


@functools.lru_cache(maxsize=8)
def _load(path: str) -> Tokenizer:
    if not path:
        return ByteTokenizer()
    if path == PYTHON:
        return python_pieces()
    file = local_path(path, (FILE, *NAMING, *_NUMBERING, *TEMPLATES))
    if file.is_dir():
        file /= FILE
    if not file.is_file():
        raise UserError(
            f"{path}: no {FILE} here; give a file of Hugging Face's tokenizers library "
            "or a folder with one (transformers' save_pretrained writes it, also for a "
            "tokenizer.model)"
        )
    return FileTokenizer(file)


def _open(file: Path) -> Any:
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{file}: reading it needs the tokenizers library: pip install "
            "'jshard[text]'"
        ) from error
    if not file.is_file():  # a pipe may never end
        raise UserError(f"{file}: not a tokenizer: it is not a file")
    if (size := file.stat().st_size) > _MOST:
        raise UserError(f"{file}: not a tokenizer: it has {size:,} bytes")
    if untrusted.is_pointer(file):
        raise UserError(f"{file}: {untrusted.POINTER}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises no narrower one
        panic = type(error).__name__ == "PanicException"  # Rust's; no Exception
        if not (panic or isinstance(error, Exception)):
            raise
        why = " ".join(str(error).split())  # it may quote line ends of the file
        raise UserError(f"{file}: not a tokenizer: {why}") from error
    tokenizer.no_truncation()  # some files carry the limits of their model
    tokenizer.no_padding()
    return tokenizer


def _state(tokenizer: Any) -> str:
    """Returns what the files beside a tokenizer.json can change."""
    added = sorted(tokenizer.get_added_tokens_decoder().items(), key=lambda x: x[0])
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    states = [part and part.__getstate__() for part in parts]
    return repr((added, states, tokenizer.encode_special_tokens))


def _ids(folder: Path, entries: Mapping[str, Any], name: str) -> list[int]:
    """Returns the tokens that an entry numbers: none, one or a list."""
    found = entries.get(name)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise UserError(f"{folder}: {name} is {str(found)[:80]}, not a token's number")
    return ids
