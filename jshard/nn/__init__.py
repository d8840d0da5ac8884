"""What models import from jshard: attention, losses, Dropout, adapters."""

from jshard.nn.adapted import adapters_off, kernel_of
from jshard.nn.attention import documents, dot_product_attention
from jshard.nn.cross_entropy import cross_entropy, token_log_probs
from jshard.nn.dropout import EmbeddingNoise
from jshard.nn.lora import add_lora
from jshard.sharding.axes.context import (
    on_whole_sequences,
    positions,
    whole_sequences,
)
from jshard.sharding.axes.experts import on_experts
from jshard.sharding.axes.tensor import (
    norm_columns,
    own_columns,
    tensor_parallel,
    with_all_columns,
)
from jshard.sharding.collectives.microbatch import StepSum
from jshard.sharding.float8.products import matmul
from jshard.sharding.layout.splits import Split
from jshard.sharding.settings.maximum import Max

__all__ = [
    "EmbeddingNoise",
    "Max",
    "Split",
    "StepSum",
    "adapters_off",
    "add_lora",
    "cross_entropy",
    "documents",
    "dot_product_attention",
    "kernel_of",
    "matmul",
    "norm_columns",
    "on_experts",
    "on_whole_sequences",
    "own_columns",
    "positions",
    "tensor_parallel",
    "token_log_probs",
    "whole_sequences",
    "with_all_columns",
]
