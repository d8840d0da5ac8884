"""Gathers and scatters of parameters, and sums."""
