"""The files of Hugging Face, PEFT and timm: tensors, names and configs."""
