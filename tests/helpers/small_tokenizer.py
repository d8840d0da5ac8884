"""A tokenizer trained in a moment, and folders with it."""

import json
from pathlib import Path

TEXT = """The quick brown fox jumps over the lazy dog. A token is a part of a word.
Numbers like 1234 and 5.6, accents like é and ñ, and 文字 are in the text, too.
user assistant system: What is the capital of France? The capital of France is Paris.
"""
EOS = "<|endoftext|>"
CHAT = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    " + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, *, begins: bool = False, **config) -> Path:
    """Writes a byte-level BPE tokenizer of about 350 tokens.

    Args:
      folder: Gets tokenizer.json and tokenizer_config.json.
      begins: Whether a text begins with a special token.
      **config: Entries of tokenizer_config.json.
    """
    import tokenizers.processors  # pyright: ignore[reportMissingImports]
    from tokenizers import (  # pyright: ignore[reportMissingImports]
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOS, "<s>", *CHAT]
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if begins:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
