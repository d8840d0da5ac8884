"""A trained model in use: decoding, scores, tasks."""
