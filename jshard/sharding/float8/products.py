"""Float8 products: weights and activations meet in one byte each.

``Precision.products`` asks for them. Hopper's tensor cores multiply float8 at twice the
rate of bfloat16. A product's operands are divided by one scale each and rounded:
activations and weights to e4m3, gradients of outputs to e5m2, which has more range and
less precision (Micikevicius et al. 2022, arXiv:2209.05433). A scale follows from the
largest magnitude of the tensor itself, each time anew. Sums are in float32.

    forward    y = q(x) @ q(w)
    backward   dx = q(dy) @ q(w).T,  dw = q(x).T @ q(dy)

XLA turns the product of two dequantized operands on GPUs into a cuBLASLt product of the
float8 values, which applies the scales. On CPUs it computes the same numbers: float8
values times powers of two are exact there.

With MXFP8 and NVFP4 (``blocks.py``) every 32 or 16 values have a scale.

Which weights these are is said, not inferred: the kernels of Flax's linear layers,
whose ``dot_general`` or ``einsum_op`` is set to the product, and parameters made for
``matmul``. While a unit runs, each holds a ``Float8``, which nothing else can read.
"""

import dataclasses
import functools
import math
import string
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jshard.sharding.float8 import blocks
from jshard.sharding.float8.formats import FORMATS
from jshard.sharding.float8.scales import largest, tensor_scale, to_float8
from jshard.sharding.settings.scopes import FLOAT8
from jshard.system.errors import UserError

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Metadata key of parameters that only ``matmul`` reads.
MATMUL = "matmul"

# cuBLASLt takes float8 matrices whose sides are multiples of 16.
_MULTIPLE = 16
# Narrower matrices (routers, low-rank adapters) gain little, and routers need bfloat16.
_NARROWEST, _THINNEST = 128, 16


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "tensor", "zeros"),
    meta_fields=("kind", "name"),
)
@dataclasses.dataclass(frozen=True)
class Float8(np.lib.mixins.NDArrayOperatorsMixin):
    """The value of a parameter that products in float8 alone read.

    Attributes:
      values: float8_e4m3fn; of NVFP4 uint8, two codes a byte along one dimension.
      scale: float32 scalar; the weight is ``values * scale``. With blocks uint8, one
        for each (``formats.Rows``).
      tensor: uint8, the exponent of another scale for all; of NVFP4 alone.
      zeros: of the weight's shape, in the dtype of the computation; take its gradient.
      kind: "float8", "mxfp8" or "nvfp4".
      name: the parameter's path.
    """

    values: jax.Array
    scale: jax.Array
    tensor: jax.Array | None
    zeros: jax.Array
    kind: str = "float8"
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.zeros.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self.zeros.ndim

    def dense(self) -> jax.Array:
        """Returns the weight in the dtype of the computation."""
        scale = self.scale.astype(self.zeros.dtype)
        return _with_gradient(_dequantized(self.values, scale), self.zeros)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        module = self.name.rpartition(".")[0]
        raise UserError(
            f"parameter {self.name!r} is in float8, for products of nnx.Linear, "
            "LinearGeneral, Einsum and jshard.nn.matmul, and the model reads it "
            f"otherwise; give {module!r} a precision without products "
            "(policy.overrides)"
        )

    __jax_array__ = __array__ = __array_ufunc__ = __iter__ = __len__ = _refuse

    def __getitem__(self, index: Any) -> "Float8":
        """Returns the weight itself for ``...``, as layers read it."""
        return self if index is ... else self._refuse()

    def __getattr__(self, name: str) -> Any:
        """Refuses what arrays have."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def matmul(x: jax.Array, weight: nnx.Variable) -> jax.Array:
    """Returns ``x @ weight``, in float8 where ``Precision.products`` asks for it.

    For a model's own parameters; Flax's linear layers need no change. The parameter is
    made with ``nnx.Param(value, matmul=True)``, and read by nothing else.

    Args:
      x: (..., inputs).
      weight: (inputs, outputs).

    Returns:
      (..., outputs).

    Raises:
      UserError: the parameter was made without ``matmul=True``.
    """
    if not (isinstance(weight, nnx.Variable) and weight.get_metadata(MATMUL, False)):
        raise UserError(
            "jshard.nn.matmul: the weight must be a parameter made with "
            f"nnx.Param(value, matmul=True), not {type(weight).__name__}"
        )
    return _multiply(jnp.matmul, "...i,io->...o", x, weight.get_value())


def take_float8(module: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Makes a module ready for weights in float8, which it still takes in any dtype.

    Yields:
      (name, dimensions) of each parameter that only products read, with the dimensions
      that these sum over, counted from the end.
    """
    if getattr(module, "promote_dtype", None) is dtypes.promote_dtype:
        if isinstance(module, nnx.Einsum) and module.einsum_op is jnp.einsum:
            module.promote_dtype, module.einsum_op = _promote_dtype, _einsum
            _, kernel, outputs = module.einsum_str.replace("->", ",").split(",")
            over = [i - len(kernel) for i, x in enumerate(kernel) if x not in outputs]
            letters = Counter(filter(str.isalpha, module.einsum_str))
            # Neither batches nor sums of an operand by itself.
            if kernel.isalpha() and set(letters.values()) == {2}:
                yield "kernel", tuple(over)
        elif isinstance(module, (nnx.Linear, nnx.LinearGeneral)):
            plain = module.dot_general in (None, lax.dot_general)
            if plain and getattr(module, "dot_general_cls", None) is None:
                module.promote_dtype, module.dot_general = _promote_dtype, _dot_general
                free = len(np.atleast_1d(module.out_features))
                over = len(np.atleast_1d(module.in_features))
                if not getattr(module, "batch_axis", None):
                    yield "kernel", tuple(range(-free - over, -free))
    for name, value in vars(module).items():
        if isinstance(value, nnx.Variable) and value.get_metadata(MATMUL, False):
            yield name, (-2,)


def fits(shape: tuple[int, ...], over: tuple[int, ...], kind: str) -> bool:
    """Returns whether products with a weight that sum over dimensions pay in float8.

    Args:
      shape: of the weight.
      over: the dimensions, counted from the end.
      kind: "float8", "mxfp8" or "nvfp4".
    """
    if kind in FORMATS and not blocks.divide(shape, over, FORMATS[kind].block):
        return False
    depth = math.prod(shape[d] for d in over)
    width = math.prod(shape) // max(depth, 1)
    small, large = sorted((depth, width))
    return (
        depth % _MULTIPLE == width % _MULTIPLE == 0
        and small >= _NARROWEST
        and large < _THINNEST * small
    )


def _promote_dtype(values: Any, **options: Any) -> Any:
    """Flax's own, except that weights in float8 stay what they are."""
    plain = (
        jnp.zeros((), x.zeros.dtype) if isinstance(x, Float8) else x for x in values
    )
    done = dtypes.promote_dtype(tuple(plain), **options)
    pairs = zip(values, done, strict=True)
    return tuple(x if isinstance(x, Float8) else y for x, y in pairs)


def _dot_general(x: jax.Array, kernel: Any, dimensions: Any, **options: Any) -> Any:
    dot = functools.partial(lax.dot_general, dimension_numbers=dimensions, **options)
    (of_x, of_kernel), _ = dimensions
    summed = dict(zip(of_kernel, of_x, strict=True))
    inputs, further = string.ascii_lowercase[: x.ndim], string.ascii_uppercase
    letters = [
        inputs[summed[i]] if i in summed else further[i] for i in range(kernel.ndim)
    ]
    outputs = [c for c in (*inputs, *letters) if (c in inputs) != (c in letters)]
    equation = f"{inputs},{''.join(letters)}->{''.join(outputs)}"
    return _multiply(dot, equation, x, kernel)


def _einsum(equation: str, x: jax.Array, kernel: Any, **options: Any) -> Any:
    dot = functools.partial(jnp.einsum, equation, **options)
    return _multiply(dot, equation, x, kernel)


def _multiply(dot: Callable[..., Any], equation: str, x: jax.Array, weight: Any) -> Any:
    """Returns ``dot(x, weight)``, which ``equation`` says as ``einsum`` reads it."""
    if not isinstance(weight, Float8):
        return dot(x, weight)
    if weight.kind in FORMATS:
        blocked = weight.values, weight.scale, weight.tensor
        return blocks.product(equation, weight.kind, x, blocked, weight.zeros)
    return _product(dot, x, weight.dense())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dot: Callable[..., Any], x: jax.Array, weight: jax.Array) -> Any:
    """Returns ``dot(x, weight)`` of a rounded weight, with ``x`` in float8, too."""
    return _forward(dot, x, weight)[0]


def _forward(dot, x, weight):
    quantized = _quantized(x, E4M3)
    with jax.named_scope(FLOAT8):
        return dot(_dequantized(*quantized), weight), (quantized, weight)


def _backward(dot, saved, dy):
    quantized, weight = saved
    x, dy = _dequantized(*quantized), _dequantized(*_quantized(dy, E5M2))
    # On GPUs, HIGHEST makes the tensor cores add up in float32 throughout.
    dot = functools.partial(dot, precision=lax.Precision.HIGHEST)
    with jax.named_scope(FLOAT8):
        (dx,) = jax.linear_transpose(lambda x: dot(x, weight), x)(dy)
        (dw,) = jax.linear_transpose(lambda weight: dot(x, weight), weight)(dy)
    return dx, dw


_product.defvjp(_forward, _backward)


def _quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    scale = tensor_scale(largest(x), dtype)
    return to_float8(x, scale, dtype), scale.astype(x.dtype)


def _dequantized(values: jax.Array, scale: jax.Array) -> jax.Array:
    return values.astype(scale.dtype) * scale


# Not a sum with zeros: XLA multiplies in float8 what is dequantized and nothing else.
@jax.custom_vjp
def _with_gradient(weight: jax.Array, zeros: jax.Array) -> jax.Array:
    """Returns the weight; ``zeros`` take its gradient."""
    return weight


_with_gradient.defvjp(lambda weight, _: (weight, None), lambda _, grad: (None, grad))
