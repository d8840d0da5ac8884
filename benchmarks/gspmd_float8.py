"""Float8 products as MaxText has them (``quantization="fp8"``), for ``gspmd.py``.

Delayed scaling: a tensor is divided by a scale that follows from its largest magnitudes
in the steps before (1,024 of them are kept), so that no product waits for a maximum
over all devices. Weights are gathered in bfloat16 and rounded afterwards.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops

_HISTORY = 1024
_TENSORS = ("input", "kernel", "output_grad")


class Scale(nnx.Param):
    """A scale or its history, of each layer; its "gradient" is its next value."""


class Product(nnx.Module):
    """Flax's ``Fp8DotGeneralOp``, for the linear layers of stacked ``nnx`` modules."""

    def __init__(self, layers: int):
        for name in _TENSORS:
            setattr(self, f"{name}_scale", Scale(jnp.ones((layers, 1))))
            setattr(self, f"{name}_history", Scale(jnp.zeros((layers, _HISTORY))))

    def __call__(
        self, x: jax.Array, kernel: jax.Array, dimensions: Any, **_: Any
    ) -> jax.Array:
        """Returns the product, of a layer's ``x`` and kernel."""
        dtype = kernel.dtype
        inputs, weights, grads = (
            (
                getattr(self, f"{name}_scale").get_value(),
                getattr(self, f"{name}_history").get_value(),
            )
            for name in _TENSORS
        )
        x = fp8_ops.in_qdq(dtype, jnp.float8_e4m3fn, x, *inputs)
        kernel = fp8_ops.in_qdq(dtype, jnp.float8_e4m3fn, kernel, *weights)
        y = fp8_ops.dot_general_with_precision(x, kernel, dimensions)
        return fp8_ops.out_qdq(dtype, jnp.float8_e5m2, y, *grads)


def use_float8(blocks: nnx.Module) -> None:
    """Gives the linear layers of a stack of blocks float8 products."""
    found = [x for _, x in nnx.iter_modules(blocks) if isinstance(x, nnx.Linear)]
    for linear in found:
        layers = linear.kernel.get_value().shape[0]
        del linear.dot_general  # it was static, a function
        linear.dot_general = Product(layers)


def overwritten(params: Any, grads: Any, updated: Any) -> Any:
    """The updated parameters, and of scales what stands for their gradients."""
    return jax.tree.map(
        lambda param, grad, new: grad if isinstance(param, Scale) else new,
        params,
        grads,
        updated,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
