"""The keys by which a recipe, if it has them, says how its model reads text."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class TextKeys:
    """What a recipe's keys say of its text; None where it has no such key.

    Attributes:
      tokenizer: `data.tokenizer`, a folder or a name.
      vocab_size: `model.vocab_size`, the number of the model's tokens.
    """

    tokenizer: str | None
    vocab_size: int | None


def text_keys(config: ConfigDict) -> TextKeys:
    """Returns what a recipe's config says of its text."""

    def key(group: str, name: str) -> Any:
        keys = config.get(group)  # which a recipe may use for something else
        return keys.get(name) if isinstance(keys, ConfigDict) else None

    return TextKeys(key("data", "tokenizer"), key("model", "vocab_size"))
