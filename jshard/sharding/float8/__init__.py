"""Float8: which products meet in one byte, and how their weights are gathered."""
