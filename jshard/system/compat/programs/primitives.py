"""Primitives of jshard's own, in programs that it traces."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

_in_place = core.Primitive("host_array_as_device_array")
_in_place.def_impl(lambda x: x)
_in_place.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_in_place, lambda ctx, x: [x])


def typed_as_device(x: jax.Array) -> jax.Array:
    """Returns a host array typed as a device array, without moving it.

    It lowers to no operation, and JAX has no such cast. With ``Policy.offload="all"``
    it is applied to parameters: their gradients would otherwise also have the host
    type, and be copied to the host and back. Before any computation the result, or a
    slice of it, must pass ``jax.device_put(..., jax.memory.Space.Device)``.

    Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If it breaks, steps with
    ``offload="all"`` fail to trace or lower; nothing else is affected.
    """
    return _in_place.bind(x)


def placeholder(
    name: str, results: Callable[..., list[Any]], refuse: Callable[..., Any]
) -> core.Primitive:
    """Returns a primitive for what is taken out of a program again before it runs.

    ``results`` returns the abstract results, given the primitive's parameters, and
    ``refuse`` raises an error where it is differentiated or batched.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, **params: results(**params))
    ad.primitive_jvps[primitive] = refuse
    batching.primitive_batchers[primitive] = refuse
    return primitive
