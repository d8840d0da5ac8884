"""Pipelines: a Stack's layers in stages, and the micro-batches that pass them."""
