"""A run's config: its keys, their types and ranges, and the command line."""

from jshard.training.config.config import Config, complete

__all__ = ["Config", "complete"]
