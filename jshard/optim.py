"""Optimizers on top of optax: updates per layer, Muon, bfloat16 moments, chains."""

from jshard.sharding.update.bf16_moments import bf16_moments
from jshard.sharding.update.muon import muon
from jshard.sharding.update.per_layer import per_layer
from jshard.sharding.update.skipping.skip_spikes import skip_spikes
from jshard.sharding.update.stacks.chain import chain
from jshard.sharding.update.whole_layers import whole_layers

__all__ = [
    "bf16_moments",
    "chain",
    "muon",
    "per_layer",
    "skip_spikes",
    "whole_layers",
]
