"""Dtypes of parameters, of the wire, of the computation and of reductions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jshard.errors import UserError
from jshard.knob import described, knob, knobs

FLOATING = ("float32", "bfloat16", "float16", "float64")
ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")


_FLOATING: dict[str, Any] = {"kind": str, "choices": FLOATING}


@described
@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes, as strings or as JAX has them; None keeps what the module declares."""

    param: Any = knob(
        None, "dtype of stored parameters; None is the model's", **_FLOATING
    )
    """Gradients and optimizer state have it, too, but for float16 parameters: theirs
    are float32."""

    gather: Any = knob(
        None,
        "dtype in which weights are gathered; None is that of compute",
        kind=str,
        choices=(*FLOATING, *ONE_BYTE),
    )
    """int8, float8_e4m3fn and float8_e5m2 are scaled in blocks
    (``jshard.comm.quantized``)."""

    compute: Any = knob(
        None, "dtype of the computation; None is the model's", **_FLOATING
    )
    """The dtype of the weights that a layer sees. Modules that declare a ``dtype``, as
    Flax's do, get it too, so that their inputs follow."""

    reduce: Any = knob(
        None, "dtype in which gradients are sent; None is that of compute", **_FLOATING
    )
    """Holds for each unit's reduce-scatter. What is added up before it is sent (over
    micro-batches, for the sum over replicas) is sent in the parameter's dtype."""

    sum: Any = knob(
        None,
        "dtype in which gradients are added up; None is that of reduce",
        **_FLOATING,
    )
    """A reduce-scatter adds up in the dtype on the wire. Another one takes an
    all-to-all of as many bytes, and each device adds up what it receives: bfloat16 on
    the wire without bfloat16's rounding in the sums."""

    def __post_init__(self):
        for name, declared in knobs(type(self)).items():
            dtype = _dtype(name, getattr(self, name), declared.choices)
            object.__setattr__(self, name, dtype)
        if self.gather is None:
            object.__setattr__(self, "gather", self.compute)


def _dtype(name: str, value: Any, possible: tuple[str, ...]) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
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
