"""Dtypes of parameters, of the wire, of the computation and of reductions."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jshard.errors import UserError

FLOATING = ("float32", "bfloat16", "float16", "float64")
ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes; None keeps what the module declares.

    Attributes:
      param: dtype of the stored parameters (and of gradients and optimizer state).
      gather: dtype on the wire of all-gathers; by default ``compute``. int8,
        float8_e4m3fn and float8_e5m2 are scaled in blocks (``jshard.quantized``).
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


def set_compute_dtype(module: Any, dtype: Any) -> None:
    """Sets the dtype of a module that declares one, as Flax's own modules do."""
    if dtype is not None and "dtype" in vars(module) and "param_dtype" in vars(module):
        module.dtype = dtype
