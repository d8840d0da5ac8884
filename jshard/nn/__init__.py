"""What a model imports: attention, cross entropy, LoRA, and splits over "tensor"."""

from jshard.float8.products import matmul
from jshard.nn.adapted import kernel_of
from jshard.nn.attention import dot_product_attention
from jshard.nn.cross_entropy import cross_entropy
from jshard.nn.lora import add_lora
from jshard.parallel.context import positions
from jshard.parallel.splits import Split
from jshard.parallel.tensor import tensor_parallel

__all__ = [
    "Split",
    "add_lora",
    "cross_entropy",
    "dot_product_attention",
    "kernel_of",
    "matmul",
    "positions",
    "tensor_parallel",
]
