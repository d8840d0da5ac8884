"""Frozen weights in 4 bits: their bytes, and which weights these are."""
