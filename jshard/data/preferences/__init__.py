"""Pairs of answers to a prompt, of which one was preferred."""
