"""What layers with adapters compute.

LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): ``x W + s dropout(x) A B``, where
s is alpha / rank, or alpha / sqrt(rank) if it is rank-stabilised (Kalajdzievski 2023,
arXiv:2312.03732). DoRA (Liu et al. 2024, arXiv:2402.09353, section 4) divides each
column of ``W + s A B`` by its norm, which counts as constant, and multiplies it with a
trained magnitude. Both are as in PEFT.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.layout.values.magnitudes import MAGNITUDE, column_norms
from jshard.sharding.layout.variables import of_class
from jshard.sharding.units.modules import is_unit, unit_class
from jshard.system.errors import UserError

A, B = "lora_a", "lora_b"  # names of the parameters
DROPOUT = "lora_dropout"
# Metadata of A: the numerator of the scale, and whether it is rank-stabilised.
ALPHA, STABILIZED = "lora_alpha", "lora_rank_stabilized"
# Which layers of a Stack have adapters, if not all; the others' A and B are zero.
LAYERS = "lora_layers"

_OFF = "lora_off"  # an attribute, so that a unit or a jitted function sees the change


@contextlib.contextmanager
def adapters_off(model: nnx.Module) -> Iterator[None]:
    """Within it a model computes as it did before ``add_lora``.

    So the base is at hand as a reference, without a second model. Calls within it need
    no gradients.

    Raises:
      UserError: the model has no adapters.
    """
    layers = [layer for _, layer in nnx.iter_modules(model) if hasattr(layer, A)]
    if not layers:
        raise UserError("adapters_off: the model has no adapters; see add_lora")
    for layer in layers:
        setattr(layer, _OFF, True)
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, _OFF)


def scale(alpha: float, rank: int, stabilized: bool | None) -> float:
    """Returns what the product of A and B is multiplied with."""
    return alpha / (math.sqrt(rank) if stabilized else rank)


def scale_of(a: nnx.Variable) -> float:
    """Returns the scale of the adapter that has this A."""
    stabilized = a.get_metadata(STABILIZED, None)
    return scale(a.get_metadata(ALPHA), a.get_value().shape[-1], stabilized)


def weight_of(module: Any) -> nnx.Variable:
    """Returns the parameter that an adapter is beside."""
    return module.embedding if isinstance(module, nnx.Embed) else module.kernel


def kernel_of(linear: Any) -> jax.Array:
    """Returns a linear layer's kernel, with its adapter added if it has one.

    For models that read the kernel of a head themselves; dropout is left out.

    Args:
      linear: an ``nnx.Linear``.

    Returns:
      The matrix, (inputs, outputs).
    """
    kernel = linear.kernel.get_value()
    if not hasattr(linear, A) or hasattr(linear, _OFF):
        return kernel
    a, b = linear.lora_a.get_value(), linear.lora_b.get_value()
    a, b, kernel = linear.promote_dtype((a, b, kernel), dtype=linear.dtype)
    s = scale_of(linear.lora_a)
    kernel = kernel + s * (a @ b)
    if not hasattr(linear, MAGNITUDE):
        return kernel
    magnitude = linear.lora_m.get_value()
    return kernel * _ratio(magnitude, column_norms(kernel)).astype(kernel.dtype)


def _ratio(magnitude: jax.Array, norms: jax.Array) -> jax.Array:
    """Returns what columns are multiplied with: 1 where one is zero, as padding is."""
    norms = lax.stop_gradient(norms)
    empty = norms == 0
    return jnp.where(empty, 1, magnitude / jnp.where(empty, 1, norms))


def adapt(module: Any) -> Any:
    """Returns a module, maybe a Unit, whose call uses the adapter of ``module``."""
    cls = _adapted_class(getattr(type(module), "plain_class", type(module)))
    return of_class(module, unit_class(cls) if is_unit(module) else cls)


@functools.cache
def _adapted_class(cls: type) -> type:
    """Returns a class beside one of layers, whose calls add what an adapter gives."""
    kinds = (nnx.Linear, _of_linear), (nnx.Embed, _of_table)
    of_adapter = next((fn for kind, fn in kinds if issubclass(cls, kind)), _of_experts)

    def call(layer: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        y = cls.__call__(layer, x, *args, **kwargs)
        if hasattr(layer, _OFF):
            return y
        return y + of_adapter(layer, x, y, *args).astype(y.dtype)

    return type(cls.__name__, (cls,), {"__call__": call})


def _of_linear(layer: Any, inputs: jax.Array, y: jax.Array) -> jax.Array:
    noisy = hasattr(layer, DROPOUT)
    if noisy:
        inputs = layer.lora_dropout(inputs)
    a, b = layer.lora_a.get_value(), layer.lora_b.get_value()
    x, a, b = layer.promote_dtype((inputs, a, b), dtype=layer.dtype)
    s = scale_of(layer.lora_a)
    added = s * (x @ a @ b)
    if not hasattr(layer, MAGNITUDE):
        return added
    kernel = layer.kernel.get_value()
    ratio = _ratio(layer.lora_m.get_value(), _norms_with(kernel, a, b, s))
    ratio = ratio.astype(y.dtype)
    if noisy:
        plain = x @ kernel.astype(x.dtype)
    else:
        plain = y if layer.bias is None else y - layer.bias.astype(y.dtype)
    return (ratio - 1) * plain + ratio * added


def _norms_with(kernel: jax.Array, a: jax.Array, b: jax.Array, s: float) -> jax.Array:
    """Returns the norms of the columns of ``kernel + s a b``, which is never made."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    product = functools.partial(jnp.matmul, preferred_element_type=wide)
    squares = jnp.sum(jnp.square(kernel.astype(wide)), axis=0)
    # That of the sum is w.w + b.(2 s a.w + s s a.a b), for each column w.
    inner = 2 * s * product(a.T, kernel) + s * s * product(product(a.T, a), b)
    return jnp.sqrt(jnp.maximum(squares + jnp.sum(b * inner, axis=0), 0))


def _of_table(table: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    a, b = table.lora_a.get_value(), table.lora_b.get_value()
    rows = jnp.take(a, ids, axis=0).astype(y.dtype)
    return scale_of(table.lora_a) * (rows @ b.astype(y.dtype))


def _of_experts(experts: Any, x: jax.Array, y: jax.Array, *args: Any) -> jax.Array:
    del y
    added = experts.product(x, experts.lora_a.get_value(), *args)
    added = experts.product(added, experts.lora_b.get_value(), *args)
    return scale_of(experts.lora_a) * added
