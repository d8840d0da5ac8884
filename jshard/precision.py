"""Dtypes of parameters, of the wire, of the computation and of reductions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jshard.errors import UserError

FLOATING = ("float32", "bfloat16", "float16", "float64")
ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes; None keeps what the module declares.

    Attributes:
      param: dtype of the stored parameters, and of gradients and optimizer state;
        those of float16 parameters are float32.
      gather: dtype on the wire of all-gathers; by default ``compute``. int8,
        float8_e4m3fn and float8_e5m2 are scaled in blocks (``jshard.comm.quantized``).
      compute: dtype of the weights a layer sees; modules that declare a ``dtype``
        (Flax's do) get it too, so that their inputs follow.
      reduce: dtype on the wire of gradients, unit by unit; by default that of the
        computation. What is added up first (over micro-batches, for the sum over
        replicas) leaves in the parameter's dtype.
      sum: dtype in which a reduction over "fsdp" adds up; by default ``reduce``, as
        a reduce-scatter does. Another one takes an all-to-all, of as many bytes, and
        each device adds up: bfloat16 on the wire without its rounding in the sums.
    """

    param: Any = None
    gather: Any = None
    compute: Any = None
    reduce: Any = None
    sum: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _dtype(field.name, value))
        if self.gather is None:
            object.__setattr__(self, "gather", self.compute)


def _dtype(name: str, value: Any) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    possible = FLOATING + (ONE_BYTE if name == "gather" else ())
    if dtype is None or dtype.name not in possible:
        raise UserError(
            f"precision.{name}: {value!r} is not one of {', '.join(possible)}"
        )
    return dtype


def updated_in(param: Any) -> Any:
    """The dtype of a parameter's gradient and optimizer state: its own, or float32.

    Between 6e-8 and 65504 float16 has no room for squares and their sums.
    """
    return jnp.dtype(jnp.float32) if param.dtype == jnp.float16 else param.dtype


def for_update(params: Any) -> Any:
    """Parameters as their optimizer sees them, in the dtypes of ``updated_in``."""

    def widen(param: Any) -> Any:
        dtype = updated_in(param)
        return param if param.dtype == dtype else param.astype(dtype)

    return jax.tree.map(widen, params)


def set_compute_dtype(module: Any, dtype: Any) -> None:
    """Sets the dtype of a module that declares one, as Flax's own modules do."""
    if dtype is not None and "dtype" in vars(module) and "param_dtype" in vars(module):
        module.dtype = dtype
