"""What tokenizer_config.json changes in a tokenizer.json, by transformers' rules.

Only for the classes whose tokenizers transformers builds from these settings: of others
tokenizer.json alone decides.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jshard.data.tokenizers.named_tokens import CONFIG, class_of, read_json
from jshard.system.errors import UserError

_BYTES = frozenset(
    f"{name}Tokenizer"
    for name in ("GPT2", "CodeGen", "GPTNeoX", "Qwen2", "Roberta", "Bart", "Bloom")
)
_SPACES = ("LlamaTokenizer", "CodeLlamaTokenizer")
_WORDS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_PARTS = ("normalizer", "pre_tokenizer", "decoder")


def apply_settings(tokenizer: Any, folder: Path) -> None:
    """Changes a `tokenizers.Tokenizer` as the tokenizer_config.json of a folder says.

    Raises:
      UserError: A setting is neither true nor false.
    """
    config, name = read_json(folder, (CONFIG,)), class_of(folder)

    def flag(key: str, default: bool | None) -> bool | None:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise UserError(
                f"{folder / CONFIG}: {key} is {str(value)[:80]!a}, not true or false"
            )
        return default if value is None else value

    tokenizer.encode_special_tokens = flag("split_special_tokens", False)
    parts = {part: _state(getattr(tokenizer, part)) for part in _PARTS}
    changed = copy.deepcopy(parts)
    if name in _BYTES:
        for step in _steps(changed["pre_tokenizer"], "ByteLevel"):
            step["add_prefix_space"] = flag("add_prefix_space", False)
    if name in _SPACES:
        _begin_with_space(changed, flag("add_prefix_space", None))
    if name in _WORDS:
        for step in _steps(changed["normalizer"], "BertNormalizer"):
            step["lowercase"] = flag("do_lower_case", True)
            step["strip_accents"] = flag("strip_accents", None)
            step["handle_chinese_chars"] = flag("tokenize_chinese_chars", True)
    if changed != parts:
        made = _made(changed)
        for part in _PARTS:
            if changed[part] != parts[part]:
                setattr(tokenizer, part, getattr(made, part))


def _begin_with_space(parts: Mapping[str, Any], wanted: bool | None) -> None:
    """Sets whether a text begins with a space, if that is said."""
    for part in ("pre_tokenizer", "decoder"):
        for step in _steps(parts[part], "Metaspace"):
            if wanted is False:
                step["prepend_scheme"] = "never"
            elif wanted and step["prepend_scheme"] == "never":
                step["prepend_scheme"] = "first"
    if wanted is False:
        for part, steps, kind in (
            ("normalizer", "normalizers", "Prepend"),
            ("decoder", "decoders", "Strip"),
        ):
            if steps in (parts[part] or {}):
                left = [step for step in parts[part][steps] if step["type"] != kind]
                parts[part][steps] = left


def _steps(part: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yields those steps of a part that are of a kind."""
    if isinstance(part, dict):
        if part.get("type") == kind:
            yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            for step in part.get(key, ()):
                yield from _steps(step, kind)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _made(parts: Mapping[str, Any]) -> Any:
    """Returns an empty tokenizer with these parts."""
    import tokenizers  # pyright: ignore[reportMissingImports]

    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        **parts,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(content))
