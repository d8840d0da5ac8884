"""Products of a few tokens with weights, on CPUs.

XLA packs the second operand of a product in each call, which takes longer than the
product of few tokens itself. So weights go first, with a row for each output: the
products of a step take two thirds of the time or less (docs/log/checkpoints.md).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def larger_first(
    x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any
) -> jax.Array:
    """Returns what ``lax.dot_general`` does, for a matrix as its second operand.

    Args:
      x: any shape.
      kernel: a matrix.
      dimensions: which are summed over, as for ``lax.dot_general``; none of a batch.
      options: the other arguments of ``lax.dot_general``.
    """
    if x.size >= kernel.size:
        return lax.dot_general(x, kernel, dimensions, **options)
    (of_x, of_kernel), batch = dimensions
    y = lax.dot_general(kernel, x, ((of_kernel, of_x), batch), **options)
    return jnp.moveaxis(y, 0, -1)


def head_product(model: nnx.Module) -> Callable[..., jax.Array]:
    """Returns what multiplies features with a decoder's head, a token at a time.

    The table of a tied head has a row for each output, as this product likes it; a
    ``head`` of its own has them in a ``Generator``.
    """
    head = getattr(model, "head", None)
    return larger_first if head is None else head.dot_general


class _OutputsFirst(nnx.Param):
    """A kernel (outputs, inputs) that reads as (inputs, outputs).

    XLA transposes within the product.
    """

    def get_value(self, *, index: Any = ...) -> jax.Array:
        """Returns the kernel, or a part of it, as a linear layer has it."""
        kernel = self.get_raw_value().T
        return kernel if index is ... else kernel[index]


def keep_outputs_first(model: nnx.Module) -> None:
    """Makes kernels of linear layers first operands, kept with a row an output."""
    for _, module in nnx.iter_modules(model):
        if not isinstance(module, nnx.Linear) or type(module.kernel) is not nnx.Param:
            continue  # another class may compute its kernel, of four bits for example
        kernel = module.kernel.get_value()
        if kernel.ndim == 2 and module.dot_general is lax.dot_general:
            module.dot_general = larger_first
            module.kernel = _OutputsFirst(kernel.T)
