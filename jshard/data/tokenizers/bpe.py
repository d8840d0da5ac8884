"""A tokenizer of one's own text: byte-level BPE, as GPT-2's is."""

import json
from collections.abc import Iterable
from pathlib import Path

from jshard.data.tokenizers.tokenizer import FILE
from jshard.system.errors import UserError

_END = "<|endoftext|>"
_CONFIG = {"eos_token": _END, "tokenizer_class": "PreTrainedTokenizerFast"}


def train_tokenizer(texts: Iterable[str], output: Path, vocab_size: int) -> int:
    """Writes a tokenizer to a folder, for `data.tokenizer` and for transformers.

    Args:
      texts: What it is trained on (Sennrich et al. 2016, section 3.2), with the
        splitting of text into words and the bytes of GPT-2's.
      output: The folder; must hold no tokenizer.
      vocab_size: The most tokens, at least 257: each byte and the end of a document.

    Returns:
      How many tokens it has: fewer than `vocab_size` if the texts are short.

    Raises:
      UserError: The library is missing, there is a tokenizer already, or no text.
    """
    try:
        from tokenizers import (  # pyright: ignore[reportMissingImports]
            Tokenizer,
            decoders,
            models,
            pre_tokenizers,
            trainers,
        )
    except ImportError as error:
        raise UserError(
            "training a tokenizer needs tokenizers: pip install 'jshard[text]'"
        ) from error
    if (output / FILE).exists():
        raise UserError(f"{output / FILE} exists; give another folder, or remove it")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((text for text in texts if text), trainer)
    size = tokenizer.get_vocab_size()
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / FILE))
    (output / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=1))
    return size
