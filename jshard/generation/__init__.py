"""Text from a model: decoding with a cache of keys and values, and sampling."""

from jshard.generation.decoding import answer_inputs, continue_prompts
from jshard.generation.generator import Generator, generate
from jshard.generation.sampling import Sampling

__all__ = ["Generator", "Sampling", "answer_inputs", "continue_prompts", "generate"]
