"""Which layers have adapters, as Hugging Face's PEFT says it."""
