"""The old name of ``jshard.checkpoint.safetensors_read``."""

from jshard.checkpoint.safetensors_read import load_safetensors

__all__ = ["load_safetensors"]
