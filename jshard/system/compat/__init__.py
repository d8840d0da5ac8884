"""Calls that are private to JAX, Flax or Orbax, or that differ between versions.

Each file covers one subject. No other part of jshard makes such calls:
``tests/system/compat/test_compat.py`` enforces this, and reports what breaks if a new
version changes one of them.
"""
