"""Models that recipes train: GPT, Llama and its relatives, BERT, T5, ViT, RegNet."""
