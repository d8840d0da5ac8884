"""Benchmarks of language models: the tasks of EleutherAI's lm_eval, on our models."""
