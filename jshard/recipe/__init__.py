"""What to train: a Python file, its config, its parameters."""
