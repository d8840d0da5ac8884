"""Checkpoints: saved whole or not at all, restored on any mesh."""
