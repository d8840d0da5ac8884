"""Gathers and scatters of parameters, and sums: nothing else communicates them."""
