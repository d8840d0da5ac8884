"""Text from a model: decoding with a cache of keys and values, and sampling."""

from jshard.inference.generation.decoding import answer_inputs, continue_prompts
from jshard.inference.generation.generator import Generator, generate
from jshard.inference.generation.sampling import Sampling
from jshard.inference.generation.weights_first import head_product

__all__ = [
    "Generator",
    "Sampling",
    "answer_inputs",
    "continue_prompts",
    "generate",
    "head_product",
]
