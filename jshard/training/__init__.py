"""A run: the loop, its folder, its report."""

from jshard.training.callbacks.hooks import StopTraining, early_stopping

__all__ = ["StopTraining", "early_stopping"]
