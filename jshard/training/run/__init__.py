"""A run's folder: its lock, metrics, checkpoints, and how a run resumes from it."""
