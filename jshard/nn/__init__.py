"""What a model imports: losses, cross entropy, attention, dropout, LoRA."""

from jshard.nn.attention import dot_product_attention
from jshard.nn.cross_entropy import cross_entropy
from jshard.nn.dropout import Dropout
from jshard.nn.lora import add_lora
from jshard.nn.loss import Loss, Mean, Means
from jshard.parallel.context import positions
from jshard.parallel.tensor import tensor_parallel
from jshard.unit.products import matmul

__all__ = [
    "Dropout",
    "Loss",
    "Mean",
    "Means",
    "add_lora",
    "cross_entropy",
    "dot_product_attention",
    "matmul",
    "positions",
    "tensor_parallel",
]
