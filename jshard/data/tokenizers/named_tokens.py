"""Tokens that the files beside a tokenizer.json name, by transformers' rules.

tokenizer_config.json names tokens, and numbers those beyond the vocabulary. The
special_tokens_map.json and added_tokens.json of older releases count where it numbers
none, and the former's names win then. A tokenizer's class names some that no file does.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.files import untrusted

CONFIG = "tokenizer_config.json"
NAMING = (CONFIG, "special_tokens_map.json", "added_tokens.json")
ROLES = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_END = "<|endoftext|>"
_ENDS = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_WORDS = {
    role: f"[{role.removesuffix('_token').upper()}]"
    for role in ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
}
_MASKED = {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
# The tokens of transformers' classes, without "Fast", that their files may leave out.
_OF_CLASS = {
    "GPT2Tokenizer": _ENDS,
    "CodeGenTokenizer": _ENDS,
    "GPTNeoXTokenizer": _ENDS,
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "LlamaTokenizer": _PIECES,
    "CodeLlamaTokenizer": _PIECES,
    "GemmaTokenizer": {
        f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad")
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "BertTokenizer": _WORDS,
    "DistilBertTokenizer": _WORDS,
    "ElectraTokenizer": _WORDS,
    "RobertaTokenizer": {**_PIECES, **_MASKED, "pad_token": "<pad>"},
    "BartTokenizer": {**_PIECES, **_MASKED, "pad_token": "<pad>"},
}
# The class of a model's tokenizer, where the files name none.
_OF_MODEL = {
    "bert": "BertTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "t5": "T5Tokenizer",
}


def class_of(folder: Path) -> str:
    """Returns the name of a tokenizer's class, without "Fast"; "" if none is known."""
    model = read_json(folder, ("config.json",))
    for content in (read_json(folder, (CONFIG,)), model):
        name = content.get("tokenizer_class")
        if isinstance(name, str) and name:
            return name.removesuffix("Fast")
    return _OF_MODEL.get(str(model.get("model_type")), "")


def name_tokens(tokenizer: Any, folder: Path) -> dict[str, str]:
    """Adds to a tokenizer the tokens that a folder names.

    Args:
      tokenizer: A `tokenizers.Tokenizer`.
      folder: Holds the files.

    Returns:
      The texts of those with a name, like "bos_token".

    Raises:
      UserError: What a file says of a token is none.
    """
    config = read_json(folder, (CONFIG,))
    where = folder / CONFIG
    names, others = _named(config, where), [*_others(config, where)]
    present = tokenizer.get_added_tokens_decoder()
    if config.get("added_tokens_decoder") is not None:
        numbered = _numbered(config["added_tokens_decoder"], where)
    else:
        where = folder / NAMING[1]
        older = read_json(folder, (NAMING[1],))
        names |= _named(older, where)
        others += _others(older, where)
        special = {token.content for token in (*names.values(), *others) if token}
        numbered = _added(folder, special) | present
    for name, text in _OF_CLASS.get(class_of(folder), {}).items():
        if name not in names and tokenizer.token_to_id(text) is not None:
            names[name] = _token(text, name, folder)
    added = [token for _, token in sorted(numbered.items(), key=lambda item: item[0])]
    known = {token.content for token in (*added, *present.values())}
    order = (*ROLES, *(name for name in names if name not in ROLES))
    for token in (*map(names.get, order), *others):
        if token is not None and token.content not in known:
            added.append(token)
            known.add(token.content)
    texts = {name: token.content for name, token in names.items() if token is not None}
    for token in added:
        token.special = token.special or token.content in texts.values()
    tokenizer.add_tokens(added)
    return texts


def _named(content: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Returns the tokens with a name, or None where a file says that there is none."""
    named = {
        name: value
        for name, value in content.items()
        if name in ROLES or (name.endswith("_token") and isinstance(value, str | dict))
    }
    if isinstance(more := content.get("extra_special_tokens"), dict):
        named |= more
    return {
        name: None if value is None else _token(value, name, where)
        for name, value in named.items()
    }


def _others(content: Mapping[str, Any], where: Path) -> Iterator[Any]:
    """Yields the special tokens without a name."""
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(found := content.get(key), list):
            yield from (_token(value, key, where) for value in found)
            return


def _numbered(content: Any, where: Path) -> dict[int, Any]:
    """Returns tokens by number, as tokenizer_config.json has them."""
    key = "added_tokens_decoder"
    if not isinstance(content, dict) or not all(map(str.isdecimal, content)):
        raise UserError(f"{where}: {key} has no tokens by their numbers")
    found = {
        int(number): _token(value, key, where) for number, value in content.items()
    }
    for number, value in content.items():
        special = isinstance(value, dict) and value.get("special") is True
        found[int(number)].special = special
    return found


def _added(folder: Path, special: set[str]) -> dict[int, Any]:
    """Returns the tokens of added_tokens.json by number."""
    where, found = folder / NAMING[2], {}
    for text, number in read_json(folder, (NAMING[2],)).items():
        if type(number) is not int:
            raise UserError(f"{where}: {text[:80]!r} has no number")
        value = {"content": text, "normalized": text not in special}
        found[number] = _token(value, "a token", where)
        found[number].special = text in special
    return found


def _token(value: Any, name: str, where: Path) -> Any:
    """Returns a special token: of a text, or of an object with "content"."""
    from tokenizers import AddedToken  # pyright: ignore[reportMissingImports]

    flags = value if isinstance(value, Mapping) else {}
    text = flags.get("content") if isinstance(value, Mapping) else value
    try:
        if not isinstance(text, str):
            raise TypeError(text)
        text.encode()  # JSON can hold half a character
        given = {key: bool(flags[key]) for key in _FLAGS if key in flags}
        return AddedToken(text, special=True, **given)
    except (TypeError, UnicodeEncodeError) as error:
        raise UserError(
            f"{where}: {name} is {str(value)[:80]!a}, not a text"
        ) from error


def read_json(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Returns the entries of JSON files; of those with one name, that of the first."""
    entries: dict[str, Any] = {}
    for name in names:
        try:
            found = untrusted.read_json(folder / name)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name}: cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise UserError(f"{folder / name}: not a JSON object")
        entries = {**found, **entries}
    return entries
