"""Data: corpora, datasets, and the batches of a process."""
