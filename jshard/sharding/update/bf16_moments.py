"""Optimizer state in bfloat16, rounded stochastically after every update.

Rounding to nearest loses any change of less than half a unit in the last place: with
b2 = 0.999 a second moment in bfloat16 (8 bits) never decays. Rounding up with a
probability equal to the fraction cut off is right on average (Gupta et al. 2015, "Deep
Learning with Limited Numerical Precision", section 3; Zamirai et al. 2020, "Revisiting
BFloat16 Training").
"""

import functools
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jshard.sharding.float8.random_bits import fold, random_bits
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.specs import follow
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.update.per_layer import asking, first_layer, layers_here


class Bf16MomentsState(NamedTuple):
    """State of ``bf16_moments``.

    Attributes:
      step: int32 scalar, updates made so far.
      inner: the inner optimizer's state, its moments in bfloat16.
    """

    step: jax.Array
    inner: Any


def bf16_moments(
    tx: optax.GradientTransformation, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of ``tx`` in bfloat16, which halves their memory.

    Moments are the floating-point leaves of its state that have a parameter's path and
    shape. Counts, scalars and factored statistics keep their dtypes. ``tx`` sees
    moments in float32; those that it returns are rounded by ``round_to_bf16``.

    The random bits depend on the seed, the step, the parameter, the moment, the layer
    and the position in it. They do not depend on the mesh, nor on whether layers are
    updated together (``per_layer`` inside or outside). Each device generates those of
    its shards.

    Args:
      tx: any optax transformation.
      seed: the seed of the rounding.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Bf16MomentsState:
        narrow = lambda name, depth, x: x.astype(jnp.bfloat16)
        inner = _map_moments(narrow, tx.init(params), params)
        return Bf16MomentsState(jnp.zeros((), jnp.int32), inner)

    def update(
        updates: Any, state: Bf16MomentsState, params: Any = None, **extra: Any
    ) -> tuple[Any, Bf16MomentsState]:
        widen = lambda name, depth, x: x.astype(jnp.float32)
        wide = _map_moments(widen, state.inner, updates)
        new_updates, inner = tx.update(updates, wide, params, **extra)
        key = jax.random.key(seed, impl="threefry2x32")
        key = tuple(jax.random.key_data(jax.random.fold_in(key, state.step)))

        def narrow(name: str, depth: int, x: jax.Array) -> jax.Array:
            if asking.get():
                return x
            words = (zlib.crc32(name.encode()), *layers_here.get())
            own = functools.reduce(fold, words, key)
            return round_to_bf16(x, random_bits(own, x.shape, depth, first_layer.get()))

        inner = _map_moments(narrow, inner, updates)
        return new_updates, Bf16MomentsState(state.step + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def round_to_bf16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds up or down to a neighbour in bfloat16, so that the mean is ``x``.

    Adds the random bits below the 16 bits that bfloat16 keeps, then truncates. Values
    that bfloat16 represents, infinities and NaN included, are unchanged. Finite values
    stay finite: above the largest bfloat16 they are rounded down.

    Args:
      x: floating-point; cast to float32 first.
      bits: uint16, uniform, shaped like ``x``.
    """
    raw = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # A carry out of the mantissa correctly gives the next power of two.
    up = raw + bits.astype(jnp.uint32)
    exponent = jnp.uint32(0x7F80_0000)
    up = jnp.where(up & exponent == exponent, raw, up)
    rounded = lax.bitcast_convert_type((up >> 16).astype(jnp.uint16), jnp.bfloat16)
    # Truncation may remove the payload of a NaN.
    return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), rounded)


def _map_moments(
    fn: Callable[[str, int, jax.Array], jax.Array], state: Any, params: Any
) -> Any:
    """Applies ``fn(name, layer dimensions, moment)`` to the moments in ``state``.

    A moment's name is its parameter's and a number. Wrappers (``per_layer``, masks)
    do not change it.
    """
    leaves_of = jax.tree_util.tree_leaves_with_path
    named = [
        (jax.tree_util.keystr((*path, *inner)), layer_dims(v) if is_variable(v) else 0)
        for path, v in leaves_of(params, is_leaf=is_variable)
        for inner, _ in leaves_of(v)
    ]
    find = follow(params, named)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    found: Counter[str] = Counter()
    mapped = []
    for path, leaf in leaves:
        name, depth = find(path, leaf) or ("", None)
        scalar = depth == jnp.ndim(leaf)  # in each layer, where it saves nothing
        if depth is None or scalar or not jnp.issubdtype(leaf.dtype, jnp.floating):
            mapped.append(leaf)
        else:
            found[name] += 1
            mapped.append(fn(f"{name}{found[name]}", depth, leaf))
    return structure.unflatten(mapped)
