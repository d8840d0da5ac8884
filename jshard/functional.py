"""Sharding without modules: gathers and scans of plain pytrees, on meshes of your own.

What they are for, with an example: docs/how_to/without_flax.md.
"""

from jshard.collectives.gather import gather
from jshard.cpu.order import in_order
from jshard.unit.functional import scan_layers

__all__ = ["gather", "in_order", "scan_layers"]
