"""The algorithm: gather, run, drop."""
