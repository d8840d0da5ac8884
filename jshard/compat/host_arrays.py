"""A primitive of our own: host memory in a program whose types say device memory."""

import jax
from jax.extend import core
from jax.interpreters import mlir

_in_place = core.Primitive("host_array_as_device_array")
_in_place.def_impl(lambda x: x)
_in_place.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_in_place, lambda ctx, x: [x])


def typed_as_device(x: jax.Array) -> jax.Array:
    """An array in host memory, left there, with the type of a device's array.

    For the parameters that a step's ``shard_map`` takes (``Policy.offload="all"``): if
    they had the type of host arrays their gradients would too, and would be moved there
    and back. JAX has no such cast, so this is a primitive that lowers to nothing.

    Only ``jax.device_put(..., jax.memory.Space.Device)`` of the result, or of its
    slices, may be computed with.

    Tried on JAX 0.10.2, 0.11.2 and 0.12.0.1. When ``Primitive``, ``ShapedArray.update``
    or ``register_lowering`` change, steps with ``offload="all"`` do not trace or lower;
    nothing else does.
    """
    return _in_place.bind(x)
