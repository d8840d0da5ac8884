"""The update on global views: per-layer optimizers, averages, offloaded states."""

from jshard.optim.bf16_moments import bf16_moments
from jshard.optim.per_layer import per_layer
from jshard.optim.whole_layers import whole_layers

__all__ = ["bf16_moments", "per_layer", "whole_layers"]
