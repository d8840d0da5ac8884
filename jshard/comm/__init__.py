"""Collectives of parameters and gradients, their transposes, and their order."""
