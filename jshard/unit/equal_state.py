"""Finds values that are equal on all devices although they are typed as varying.

A gathered weight is typed as varying, so that jshard can place the sum of its gradient.
Everything computed from it is then typed as varying, too, such as the singular vectors
of an ``nnx.SpectralNorm``. These values are still equal on all devices unless they
depend on a device's own examples. A dataflow analysis of the jaxpr tells which do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.comm.varying import abstract_like, varying
from jshard.compat.collective_primitives import SUMS, axes_of, groups_of
from jshard.compat.jaxprs import has, open_inner
from jshard.mesh import manual_axes
from jshard.unit.dataflow import dependencies

# Primitives whose results may differ by device even if their inputs do not.
_APART = {
    "axis_index",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
    "reduce_scatter",
    "debug_callback",
    "io_callback",
    "pure_callback",
}


def differing(fn: Callable, *args: tuple[Any, bool]) -> list[bool]:
    """Returns whether each array that ``fn(*args)`` returns may differ by device.

    Args:
      fn: a function of pytrees of arrays.
      *args: pairs of an argument and whether it differs by device. Shards count as
        equal, because a layer sees them gathered.
    """
    abstract = [jax.tree.map(abstract_like, value) for value, _ in args]
    jaxpr = jax.make_jaxpr(fn)(*abstract).jaxpr
    inputs = [int(differs) for value, differs in args for _ in jax.tree.leaves(value)]
    consts = [int(bool(varying(v.aval))) for v in jaxpr.constvars]
    return list(map(bool, dependencies(jaxpr, inputs, _rule, consts)))


def _rule(eqn: Any, entering: list[int]) -> list[int] | None:
    """The rule of ``dependencies`` for the bit of what may differ by device."""
    name = eqn.primitive.name
    if name in SUMS and _over_all_devices(eqn):
        return [0] * len(eqn.outvars)
    if name == "optimization_barrier":
        return entering
    analysed = name == "scan" or open_inner(eqn) is not None
    return None if analysed or not has(eqn, _APART) else [1] * len(eqn.outvars)


def _over_all_devices(eqn: Any) -> bool:
    apart = {axis for axis in manual_axes() if lax.axis_size(axis) > 1}
    return apart <= set(axes_of(eqn)) and not groups_of(eqn)


def of_first_device(x: jax.Array) -> jax.Array:
    """Returns the first device's ``x`` on all devices, typed as not varying."""
    here = lax.axis_index(manual_axes()) == 0
    number = x.astype(jnp.uint8) if x.dtype == bool else x
    number = jnp.where(here, number, jnp.zeros_like(number))
    return lax.psum(lax.stop_gradient(number), manual_axes()).astype(x.dtype)
