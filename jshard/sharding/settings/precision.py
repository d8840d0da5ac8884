"""Dtypes of parameters, collectives, computation and reductions."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.system.cli.knob import described, knob, knobs
from jshard.system.errors import UserError

FLOATING = ("float32", "bfloat16", "float16", "float64")
ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")
PRODUCTS = {"float8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}  # bytes of a weight's value
Products = Literal["float8", "mxfp8", "nvfp4"]
FourBits = Literal["nf4", "fp4", "nf4_single", "fp4_single"]
FOUR_BITS = get_args(FourBits)

_FLOATING: dict[str, Any] = {"kind": str, "choices": FLOATING}


@described
@dataclasses.dataclass(frozen=True)
class Precision:
    """Mixed precision: dtypes, as strings or JAX dtypes; None keeps the module's."""

    param: Any = knob(
        None,
        "dtype of stored parameters; None is the model's",
        **_FLOATING,
        more="Gradients and optimizer state have it too, except that those of float16 "
        "parameters are float32.",
    )

    gather: Any = knob(
        None,
        "dtype in which weights are gathered; None is that of compute",
        kind=str,
        choices=(*FLOATING, *ONE_BYTE),
        more="int8, float8_e4m3fn and float8_e5m2 are scaled in blocks "
        "(``collectives/quantized.py``). Adapters (``nnx.LoRAParam``) are small and "
        "learn in small steps: in place of one byte they are gathered in the dtype "
        "of compute.",
    )

    compute: Any = knob(
        None,
        "dtype of the computation; None is the model's",
        **_FLOATING,
        more="The dtype of a layer's weights. The ``dtype`` attribute of modules that "
        "have one, like Flax's own, is set to it, so that their inputs are cast "
        "too. A module that was given a wider dtype keeps it, as a router does with "
        "``dtype=float32``, unless overrides give it a precision: its weights are "
        "gathered and used in its own.",
    )

    reduce: Any = knob(
        None,
        "dtype in which gradients are sent; None is that of compute",
        **_FLOATING,
        more="It applies to what each unit sends. Gradients that are accumulated over "
        "micro-batches, and those of replicated parameters, are sent in the "
        "parameter's dtype at the end of the step.",
    )

    sum: Any = knob(
        None,
        "dtype in which gradients are summed; None is that of reduce",
        **_FLOATING,
        more="A collective sums in the dtype it sends. For another dtype an all-to-all "
        "of as many bytes replaces a reduce-scatter, and each device sums "
        "what it receives: bfloat16 is sent, without its rounding in the sums. An "
        "all-reduce over replicas, or in plain data parallelism, is sent in this "
        "dtype. Gradients of micro-batches add up in it, too, if it is wider than the "
        "parameter.",
    )

    products: Products | None = knob(
        None,
        "float8 multiplies the weights of layers with activations in float8, on GPUs "
        "of compute capability 8.9 or newer; mxfp8 has a scale for each 32 values, and "
        "nvfp4 four bits and a scale for each 16, both on Blackwell; None multiplies "
        "in compute's dtype",
        kind=str,
        choices=tuple(PRODUCTS),
        more="In float8 weights and activations are float8_e4m3fn, and gradients of "
        "outputs float8_e5m2, each tensor with one scale. In mxfp8 all are "
        "float8_e4m3fn, in blocks of 32 along the dimension that a product sums over, "
        "weights in blocks of 32 x 32. In nvfp4 all are float4_e2m1fn, in blocks of "
        "16, and gradients are rounded stochastically. Sums are in float32. These "
        "weights are gathered in 8 or 4 bits, whatever ``gather`` is: the kernels of "
        "``nnx.Linear``, ``LinearGeneral`` and ``Einsum`` in layers, and parameters "
        "for ``jshard.nn.matmul``. Embeddings, heads, norms and the root keep "
        "``compute``, and so do weights whose smaller side is below 128 or a 16th of "
        "the larger (routers), or whose sides are not multiples of 16 (in mxfp8 "
        "of 32). CPUs emulate the same numbers.",
    )

    base: FourBits | None = knob(
        None,
        "nf4 or fp4 keeps the frozen matrices of layers in 4 bits, as bitsandbytes "
        "does (QLoRA), and nf4_single or fp4_single without double quantization; None "
        "keeps them in param's dtype",
        kind=str,
        choices=FOUR_BITS,
        more="They are sharded and gathered in 4.127 bits per value, or 4.5 without "
        "double quantization, and decoded to the dtype of compute where they are used, "
        "again in the backward. Embeddings, heads, biases, norms and the root stay as "
        "they are. Meshes have the axes replica, fsdp and context alone.",
    )

    def __post_init__(self) -> None:
        for name, declared in knobs(type(self)).items():
            value = getattr(self, name)
            if value is None:
                continue
            if name in ("products", "base"):
                if value not in declared.choices:
                    possible = ", ".join(("None", *declared.choices))
                    raise UserError(
                        f"precision.{name}: {value!r} is not one of {possible}"
                    )
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or dtype.name not in declared.choices:
                possible = ", ".join(declared.choices)
                raise UserError(f"precision.{name}: {value!r} is not one of {possible}")
            object.__setattr__(self, name, dtype)
        if self.products is not None and self.compute in (jnp.float16, jnp.float64):
            raise UserError(
                f"precision.products={self.products!r} does not go with "
                f"compute={self.compute.name!r}; use bfloat16 or float32"
            )
        if self.products is not None and self.base is not None:
            raise UserError(
                f"precision.base={self.base!r} does not go with products="
                f"{self.products!r}: weights in 4 bits are multiplied in compute's "
                "dtype; leave one of them out"
            )
        if self.gather is None:
            object.__setattr__(self, "gather", self.compute)

    def keeping(self, own: Any) -> "Precision":
        """Returns these dtypes for a module of a dtype of its own, kept if wider.

        Args:
          own: the dtype, or None.
        """
        compute = self.compute
        if own is None or compute is None or own.itemsize <= compute.itemsize:
            return self
        gather = None if self.gather == compute else self.gather
        return dataclasses.replace(
            self, gather=gather, compute=own, products=None, base=None
        )


def is_quantized(dtype: Any) -> bool:
    """Returns whether ``dtype`` has one byte, so that values are sent with scales."""
    return dtype is not None and jnp.dtype(dtype).itemsize == 1


def is_float(x: Any) -> bool:
    """Returns whether ``x`` (array or abstract array) is float, thus differentiable."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def updated_in(param: Any) -> Any:
    """Returns the dtype of a parameter's gradient and optimizer state.

    It is the parameter's, but float32 for float16, whose range (6e-8 to 65504) is too
    small for squares and their sums.
    """
    return jnp.dtype(jnp.float32) if param.dtype == jnp.float16 else param.dtype


def for_update(params: Any) -> Any:
    """Casts parameters to the dtypes that their optimizer sees (``updated_in``)."""
    return jax.tree.map(lambda param: param.astype(updated_in(param)), params)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Casts float16 and bfloat16 to float32: float16 sums overflow at 65504."""
    low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if low else x


def own_dtype(module: Any) -> Any:
    """Returns the floating dtype that a module was given, or None.

    ``nnx.Embed`` takes that of its table where it is given none.
    """
    dtype = getattr(module, "dtype", None) if _has_dtype(module) else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    dtype, of_table = jnp.dtype(dtype), jnp.dtype(module.param_dtype)
    return None if isinstance(module, nnx.Embed) and dtype == of_table else dtype


def set_compute_dtype(module: Any, dtype: Any) -> None:
    """Sets the dtype of a module that has one, as Flax's own modules do."""
    if dtype is not None and _has_dtype(module):
        module.dtype = dtype


def _has_dtype(module: Any) -> bool:
    return {"dtype", "param_dtype"} <= vars(module).keys()
