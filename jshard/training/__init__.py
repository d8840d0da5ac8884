"""Runs of recipes: the training loop, the run's folder, and its report."""

from jshard.training.callbacks.hooks import StopTraining, early_stopping

__all__ = ["StopTraining", "early_stopping"]
