"""Tiny decoders of transformers, random, and what they say of tokens."""

from typing import Any

import numpy as np
import pytest

from foreign_weights import randomize

# For tests that run torch.
WARNINGS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
MARKS = [pytest.mark.slow, WARNINGS]
V = 96
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_NOT_OF_GPT2 = ("intermediate_size", "num_key_value_heads")


def random_decoder(config: str, **options: Any) -> Any:
    """A model of these sizes and options, by the name of its config's class."""
    transformers = pytest.importorskip("transformers")

    sizes = SIZES | options
    if config == "GPT2Config":  # it would write them
        sizes = {k: v for k, v in sizes.items() if k not in _NOT_OF_GPT2}
    made = getattr(transformers, config)(**sizes)
    made._attn_implementation = "eager"  # the others have no soft cap
    return randomize(transformers.AutoModelForCausalLM.from_config(made))


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")

    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()
