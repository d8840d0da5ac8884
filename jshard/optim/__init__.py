"""The update on global views: per-layer optimizers, averages, offloaded states."""

from jshard.optim.bf16_moments import bf16_moments
from jshard.optim.per_layer import per_layer

__all__ = ["bf16_moments", "per_layer"]
