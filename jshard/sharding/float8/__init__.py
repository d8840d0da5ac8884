"""Products in one byte or less, and gathers of their weights."""
