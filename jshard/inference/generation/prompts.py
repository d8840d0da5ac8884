"""What a model can be given to continue, or to answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jshard.system.errors import UserError


def check_decodes(model: Any) -> None:
    """Raises a UserError if a model has no methods to decode with a cache."""
    wanted = "decode" if is_encoder_decoder(model) else "init_cache"
    for name in (wanted, "decode"):
        if not callable(getattr(model, name, None)):
            raise UserError(
                f"generate: {type(model).__name__} has no method {name}; models/gpt.py "
                "and models/llama.py show what a model needs, and models/t5.py an "
                "encoder-decoder"
            )


def check_decoder(model: Any, where: str) -> None:
    """Raises a UserError unless a model continues texts; ``where`` begins it."""
    if is_encoder_decoder(model) or not callable(getattr(model, "init_cache", None)):
        raise UserError(
            f"{where}: {type(model).__name__} is not a decoder, so it "
            "cannot continue texts"
        )
    context_length(model)


def is_encoder_decoder(model: Any) -> bool:
    """Returns whether prompts go to an encoder, and are not continued."""
    methods = ("encode", "decode")  # an encoder has the first
    return all(callable(getattr(model, name, None)) for name in methods)


def context_length(model: Any) -> int:
    """Returns the most tokens of a text: what a decoder is meant for, or trained on.

    Raises:
      UserError: the model's config does not say.
    """
    config = getattr(model, "config", None)
    for name in ("context_length", "sequence_length"):
        if length := getattr(config, name, 0):
            return length
    raise UserError(
        f"{type(model).__name__}.config has no sequence_length, the most tokens of a "
        "text"
    )


def check_prompts(model: Any, prompts: Sequence[np.ndarray], length: int) -> None:
    """Raises a UserError unless a model can generate after prompts.

    Args:
      model: the model, whose weights are not read.
      prompts: tokens.
      length: how many tokens to generate after each.
    """
    check_decodes(model)
    if not prompts:
        raise UserError("generate: there are no prompts")
    if length < 1:
        raise UserError(f"generate: length={length} must be at least 1")
    context = None if is_encoder_decoder(model) else context_length(model)
    vocab_size = getattr(model.config, "vocab_size", None)
    for number, prompt in enumerate(prompts, 1):
        where = f"prompt {number} of {len(prompts)}"
        if not len(prompt):
            raise UserError(f"{where} is empty; give at least one token")
        if context is not None and len(prompt) >= context:
            raise UserError(
                f"{where} has {len(prompt)} tokens, which leaves no room in the "
                f"model's context of {context}; shorten it"
            )
        outside = (prompt < 0) | (prompt >= (vocab_size or np.inf))
        if np.any(outside):
            raise UserError(
                f"{where} has token {prompt[outside][0]}, but the model's "
                f"vocabulary has {vocab_size}: is it another model's tokenizer?"
            )


def tokens_after(model: Any, prompts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns how many tokens to generate after each prompt.

    A decoder's text ends with its context. What an encoder-decoder writes has no such
    end.
    """
    if is_encoder_decoder(model):
        return np.full(len(prompts), length)
    room = context_length(model) - np.array([len(prompt) for prompt in prompts])
    return np.minimum(room, length)
