"""A run's config: its keys, their types and ranges, and the command line."""

from jshard.recipe.config.run_config import Config, complete

__all__ = ["Config", "complete"]
