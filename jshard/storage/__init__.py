"""Arrays in files: checkpoints, Hugging Face's, adapters."""
