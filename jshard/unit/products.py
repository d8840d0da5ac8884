"""Float8 products: weights and activations meet in one byte each.

``Precision.products`` asks for them. Hopper's tensor cores multiply float8 at twice the
rate of bfloat16. A product's operands are divided by one scale each and rounded:
activations and weights to e4m3, gradients of outputs to e5m2, which has more range and
less precision (Micikevicius et al. 2022, arXiv:2209.05433). A scale follows from the
largest magnitude of the tensor itself, each time anew. Sums are in float32.

    forward    y = q(x) @ q(w)
    backward   dx = q(dy) @ q(w).T,  dw = q(x).T @ q(dy)

XLA turns the product of two dequantized operands on GPUs into a cuBLASLt product of the
float8 values, which applies the scales. On CPUs it computes the same numbers in
float32: float8 values times powers of two are exact there.

A layer is traced with its weights in the dtype of the computation, and then run with a
``Weight`` in place of each weight that it only multiplies with. So model code, whoever
wrote it, needs no change, and weights are gathered in float8.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jshard.collectives.quantized import largest, tensor_scale, to_float8
from jshard.compat.jaxprs import CALLS, bind, context, inner_jaxpr, read
from jshard.fsdp.mesh import on_gpus
from jshard.fsdp.precision import is_float

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

# cuBLASLt takes float8 matrices whose sides are multiples of 16.
_MULTIPLE = 16
# Narrower matrices (routers, low-rank adapters) gain little, and routers need bfloat16.
_NARROWEST, _THINNEST = 128, 16

_SAME_VALUES = ("reshape", "transpose", "squeeze", "copy")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "handle"),
    meta_fields=("index",),
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight in float8, in place of an array in a layer's program.

    Attributes:
      values: float8_e4m3fn.
      scale: float32 scalar; the weight is ``values * scale``.
      handle: an array of the same shape whose gradient is the weight's. No product
        reads its values.
      index: its number among the layer's weights.
    """

    values: Any
    scale: Any
    handle: Any
    index: int

    def map(self, fn: Callable[[Any], Any]) -> "Weight":
        """Returns the weight with ``fn`` applied to values and handle."""
        values, handle = fn(self.values), fn(self.handle)
        return dataclasses.replace(self, values=values, handle=handle)


# The dtypes of y, dx and dw are static.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(dtypes: tuple[Any, Any, Any], x_MK: jax.Array, weight_KN: Weight) -> Any:
    """Returns ``x @ weight`` with both in float8, (M, N)."""
    return _forward(dtypes, x_MK, weight_KN)[0]


def _forward(dtypes, x_MK, weight_KN):
    x, w = _quantized(x_MK, E4M3), dataclasses.replace(weight_KN, handle=None)
    return _dot(x, (w.values, w.scale), (1, 0), dtypes[0]), (x, w)


def _backward(dtypes, saved, dy_MN):
    x, w = saved
    dy, exact = _quantized(dy_MN, E5M2), lax.Precision.HIGHEST
    dx_MK = _dot(dy, (w.values, w.scale), (1, 1), dtypes[1], exact)
    dw_KN = _dot(x, dy, (0, 0), dtypes[2], exact)
    return dx_MK, dataclasses.replace(w, values=None, scale=None, handle=dw_KN)


product.defvjp(_forward, _backward)

# In the names of a step's operations, where profiles and the start-up note find it.
SCOPE = "float8"


def _quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    scale = tensor_scale(largest(x), dtype)
    return to_float8(x, scale, dtype), scale


def _dot(
    a: tuple[jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array],
    contracted: tuple[int, int],
    dtype: Any,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> jax.Array:
    """Returns the product of two matrices, (values, scale) each, in ``dtype``.

    On GPUs, HIGHEST makes the tensor cores add up in float32 throughout.
    """
    fused = on_gpus()
    wide = jnp.bfloat16 if fused else jnp.float32
    a_wide, b_wide = (v.astype(wide) * scale.astype(wide) for v, scale in (a, b))
    dimensions = ((contracted[:1], contracted[1:]), ((), ()))
    out = dtype if fused else jnp.float32
    with jax.named_scope(SCOPE):
        y = lax.dot_general(
            a_wide, b_wide, dimensions, precision, preferred_element_type=out
        )
    return y.astype(dtype)


def multiplied_only(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    candidates: Sequence[bool],
) -> list[bool]:
    """Returns which of a layer's weights are only multiplied with, in float8.

    The first of its abstract ``inputs`` are weights, of which ``candidates`` are
    considered.
    """
    chosen = list(candidates)

    def trace(*inputs: Any) -> list[Any]:
        values: list[Any] = list(inputs)
        for i, is_chosen in enumerate(chosen):
            if is_chosen:
                quantized = inputs[i].astype(E4M3)
                values[i] = Weight(quantized, jnp.float32(1), inputs[i], i)
        return list(map(_dense, run(jaxpr, consts, values)))

    while any(chosen):
        try:
            jax.make_jaxpr(trace)(*inputs)
        except _UsedOtherwise as error:
            chosen[error.index] = False
        else:
            break
    return chosen


class _UsedOtherwise(Exception):
    """A weight in float8 is used other than in a product."""

    def __init__(self, index: int):
        super().__init__(index)
        self.index = index


def _dense(value: Any) -> Any:
    """Returns an array; raises _UsedOtherwise for a Weight, which has none."""
    if isinstance(value, Weight):
        raise _UsedOtherwise(value.index)
    return value


def run(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Runs a layer's program, some of whose inputs are Weights.

    Raises:
      _UsedOtherwise: a Weight is not only multiplied with.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, inputs, strict=True)
    for eqn in jaxpr.eqns:
        values = read(env, eqn.invars)
        with context(eqn):
            if any(isinstance(x, Weight) for x in values):
                results = _with_weights(eqn, values)
            else:
                results = bind(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return read(env, jaxpr.outvars)


def _with_weights(eqn: Any, values: list[Any]) -> list[Any]:
    name, (first, *others) = eqn.primitive.name, values
    if name == "dot_general" and _fits(eqn, values):
        return [_dot_general(eqn, values)]
    if name == "convert_element_type" and not _widens(eqn):
        return [first]
    if name in _SAME_VALUES and not others:
        return [first.map(lambda x: bind(eqn, [x])[0])]
    if name in CALLS and not name.startswith("custom"):
        inner = inner_jaxpr(eqn)
        call = functools.partial(run, inner.jaxpr, inner.consts)
        if "policy" in eqn.params:  # nnx.remat, or jax.checkpoint
            options = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
            call = jax.checkpoint(call, **options)
        return call(values)
    return bind(eqn, list(map(_dense, values)))


def _widens(eqn: Any) -> bool:
    """Returns whether an author wants more precision, as routers do."""
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return not is_float(after) or after.dtype.itemsize > before.dtype.itemsize


def _fits(eqn: Any, values: list[Any]) -> bool:
    """Returns whether a ``dot_general`` can be one product in float8."""
    contracted, batch = eqn.params["dimension_numbers"]
    at = [isinstance(x, Weight) for x in values]
    if all(at) or any(batch):
        return False
    x, weight = eqn.invars[at.index(False)].aval, eqn.invars[at.index(True)].aval
    depth = math.prod(weight.shape[d] for d in contracted[at.index(True)])
    width = weight.size // max(depth, 1)
    small, large = sorted((depth, width))
    return (
        x.dtype in (jnp.bfloat16, jnp.float32)
        and depth % _MULTIPLE == width % _MULTIPLE == 0
        and small >= _NARROWEST
        and large < _THINNEST * small
    )


def _dot_general(eqn: Any, values: list[Any]) -> jax.Array:
    """Returns a ``dot_general`` with one Weight, as a product of two matrices."""
    contracted, _ = eqn.params["dimension_numbers"]
    pairs: list[Any] = list(zip(values, contracted, strict=True))
    weight_first = isinstance(values[0], Weight)
    (x, over_x), (weight, over_w) = pairs[::-1] if weight_first else pairs
    free_x, free_w = (
        tuple(d for d in range(v.ndim) if d not in over)
        for v, over in ((x, over_x), (weight.handle, over_w))
    )
    rows, columns = (
        tuple(v.shape[d] for d in free)
        for v, free in ((x, free_x), (weight.handle, free_w))
    )
    x_MK = x.transpose(*free_x, *over_x).reshape(math.prod(rows), -1)
    weight_KN = weight.map(
        lambda w: w.transpose(*over_w, *free_w).reshape(-1, math.prod(columns))
    )
    dtypes = (eqn.outvars[0].aval.dtype, x.dtype, weight.handle.dtype)
    y_MN: Any = product(dtypes, x_MK, weight_KN)
    y = y_MN.reshape(*rows, *columns)
    if weight_first:
        order = [*range(len(rows), y.ndim), *range(len(rows))]
        y = y.transpose(order)
    return y
