"""Linen models as they are, with units by type: ``Model``."""

from jshard.linen.linen_model import Model

__all__ = ["Model"]
