"""Examples, tokenizers, and the batch of a step."""
