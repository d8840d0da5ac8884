"""Random streams: those of masks, and plain ones that depend on the mesh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.in_stages import stages_here
from jshard.sharding.settings.mesh import (
    OUTSIDE_IN,
    manual_axes,
    shared_axes,
)


class DropoutKey(nnx.Variable):
    """The base key of a Dropout, drawn when the module is made."""


class DropoutCount(nnx.Variable):
    """How often a Dropout was called: the step, if it is called once per step."""


def is_random(variable: nnx.Variable) -> bool:
    """Returns whether a variable is part of a random stream."""
    return isinstance(variable, nnx.RngState | DropoutKey | DropoutCount)


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    """Returns this device's place along mesh axes; 0 outside a step."""
    return lax.axis_index(axes) if axes else 0


def in_batch(own: jax.Array, size: int) -> jax.Array:
    """Returns the indices in the global batch of some of a device's ``size`` examples.

    A stage of a pipeline has the examples of one device of each stage.
    """
    stages, shared = stages_here(), shared_axes()
    own_axes = {*manual_axes()} - {*shared}
    axes = tuple(axis for axis in OUTSIDE_IN if axis in own_axes)  # as batches are cut
    if stages == 1:
        return jnp.asarray(_index(axes) * size, jnp.uint32) + own
    size //= stages
    within = _index(axes[1:]) + lax.axis_size(axes[1:]) * (own // size)
    copies = _index(axes[:1]) * lax.axis_size(axes[1:]) * stages  # axes[0] is "replica"
    return jnp.asarray(copies + within, jnp.uint32) * size + own % size


def _is_stream(leaf: Any) -> bool:
    """Returns whether a Variable or array has typed keys, but not those of Dropout."""
    if isinstance(leaf, DropoutKey):
        return False
    value = _value_of(leaf)
    is_array = isinstance(value, (jax.Array, jax.ShapeDtypeStruct))
    return is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _value_of(leaf: Any) -> Any:
    return leaf.get_value() if is_variable(leaf) else leaf


def _with_value(leaf: Any, value: jax.Array) -> Any:
    return leaf.copy(value) if is_variable(leaf) else value


def _fold(keys: jax.Array, *numbers: Any) -> jax.Array:
    """Folds numbers into each of an array of keys."""
    one = lambda key: functools.reduce(jax.random.fold_in, numbers, key)
    return jax.vmap(one)(keys.reshape(-1)).reshape(keys.shape)


def fold_streams(state: nnx.State, index: Any) -> nnx.State:
    """Folds device and micro-batch index into the keys of plain random streams.

    These are typed keys (``jax.random.key``), in Variables of any type or in none.
    Otherwise every device would draw the same mask for its different examples.
    """
    device = jnp.asarray(_index(manual_axes()), jnp.uint32)

    def fold(leaf: Any) -> Any:
        if not _is_stream(leaf):
            return leaf
        return _with_value(leaf, _fold(_value_of(leaf), device, index))

    return jax.tree.map(fold, state, is_leaf=is_variable)


def unfold_streams(before: nnx.State, given: nnx.State, after: nnx.State) -> nnx.State:
    """Returns ``after`` with keys that are the same on every device.

    Keys keep their stored values, without what ``fold_streams`` folded in. A key that
    the model replaced, as in ``self.key[...], key = jax.random.split(self.key[...])``,
    is followed by a key that it does not have yet. ``before`` is the model state as it
    is stored, ``given`` what ``fold_streams`` made of it.
    """

    def unfold(old: Any, given: Any, new: Any) -> Any:
        if isinstance(old, nnx.RngKey):  # counts tell its draws apart
            return old
        if not _is_stream(old):
            return new
        keys = _value_of(old)
        had, has = (jax.random.key_data(_value_of(x)) for x in (given, new))
        replaced = jnp.any((had != has).reshape(*keys.shape, -1), axis=-1)
        replaced = lax.pmax(replaced.astype(jnp.uint32), manual_axes()) > 0
        return _with_value(old, jnp.where(replaced, _fold(keys, _NEXT), keys))

    return jax.tree.map(unfold, before, given, after, is_leaf=is_variable)


_NEXT = np.uint32(2**32 - 1)  # no device and no micro-batch has this index


def plain_streams(model: nnx.Module) -> list[str]:
    """Returns the paths of random streams whose draws depend on the mesh."""
    return [
        ".".join(map(str, path[:-1] if isinstance(value, nnx.RngKey) else path))
        for path, value in nnx.iter_graph(model)
        if _is_stream(value)
    ]


def merge_state(
    before: nnx.State, after: nnx.State, *, last: bool | jax.Array = True
) -> nnx.State:
    """Returns the model state for the next micro-batch, or step if ``last``.

    Within a step each micro-batch draws from the same keys and counts, because its
    index is already part of the masks.
    """

    def pick(old: Any, new: Any) -> Any:
        if isinstance(old, DropoutKey):
            return old
        drawn = isinstance(old, (nnx.RngCount, DropoutCount)) or _is_stream(old)
        if drawn and last is not True:
            value = jnp.where(last, _value_of(new), _value_of(old))
            return _with_value(old, value)
        return new

    return jax.tree.map(pick, before, after, is_leaf=is_variable)
