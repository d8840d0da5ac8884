"""Runs of recipes: the training loop, the run's folder, and its report."""

from jshard.training.callbacks.hooks import StopTraining, early_stopping
from jshard.training.run.loggers.tracker import Tracker

__all__ = ["StopTraining", "Tracker", "early_stopping"]
