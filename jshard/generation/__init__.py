"""Text from a model: decoding with a cache of keys and values, and sampling."""

from jshard.generation.decoding import continue_prompts
from jshard.generation.generator import Generator, generate
from jshard.generation.sampling import Sampling

__all__ = ["Generator", "Sampling", "continue_prompts", "generate"]
