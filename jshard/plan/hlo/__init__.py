"""Compiled programs as text, read."""

from jshard.plan.hlo.hlo import parse

__all__ = ["parse"]
