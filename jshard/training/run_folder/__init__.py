"""A run's folder: its lock, metrics, checkpoints, and where it goes on."""
