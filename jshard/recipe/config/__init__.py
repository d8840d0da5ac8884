"""A run's config: its keys, their types and ranges, and the command line."""

from jshard.recipe.config.run_config import complete

__all__ = ["complete"]
