"""Compiled programs: parsing XLA's text, and dataflow through it."""

from jshard.plan.hlo.program_text import (
    Array,
    Computation,
    Instruction,
    Module,
    direction,
    parse,
)

__all__ = ["Array", "Computation", "Instruction", "Module", "direction", "parse"]
