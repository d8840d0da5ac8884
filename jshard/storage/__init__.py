"""Arrays in files: checkpoints, Hugging Face's folders, adapters, safetensors."""
