"""What ``python -m jshard.train`` and ``jshard.Trainer`` add to the library."""

from jshard.training.callbacks.hooks import StopTraining, early_stopping

__all__ = ["StopTraining", "early_stopping"]
