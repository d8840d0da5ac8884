"""LoRA: low-rank adapters beside frozen weights.

Hu et al. 2021, arXiv:2106.09685, section 4.1: a layer ``y = x W`` becomes
``y = x W + (alpha / rank) dropout(x) A B``, of which A and B alone are trained. B is
zero at first, so that the model starts as what it was.
"""

import contextlib
import fnmatch
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.errors import UserError, some_of
from jshard.layout.layer_dims import IN_LAYER, layer_dims, mark_layers
from jshard.nn.dropout import Dropout
from jshard.unit.modules import is_unit

# Metadata key of an adapter: the numerator of its scale, alpha / rank.
ALPHA = "lora_alpha"
DROPOUT = "lora_dropout"
_OFF = "lora_off"  # an attribute, so that a unit or a jitted function sees the change

# Uniform in +-1/sqrt(inputs), as in PEFT: He et al. 2015, arXiv:1502.01852, for leaky
# rectifiers of slope sqrt(5).
_init_a = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def add_lora(
    model: nnx.Module,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = ("*",),
    dropout: float = 0.0,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> None:
    """Adds adapters to the linear layers of a model, in place.

    Each of them gets the parameters ``lora_a`` (inputs, rank) and ``lora_b`` (rank,
    outputs), of type ``nnx.LoRAParam``; those of a Stack's layers are stacked as its
    kernel is. Names and values of the other parameters stay. Give
    ``wrt=nnx.LoRAParam`` to ``FSDP.init`` to train the adapters alone.

    Args:
      model: the model, whose class may be anything.
      rank: of the product of both matrices.
      alpha: the product is scaled by ``alpha / rank``.
      targets: patterns of module paths, without the layer index of Stacks: "*" is every
        ``nnx.Linear`` that is no Unit of its own (heads are, and like embeddings can
        have no adapters), "attention.q" or
        "attention.*" those whose path is, or ends with, something like it.
      dropout: rate of the dropout of the adapters' inputs.
      param_dtype: of the adapters.
      rngs: random streams for ``lora_a`` and for dropout.

    Raises:
      UserError: the rank is below 1, or a pattern matches no linear layer.
    """
    if rank < 1:
        raise UserError(f"add_lora: rank={rank} must be at least 1")
    linears = {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Linear) and not is_unit(module)
    }
    for name, linear in _matching(linears, targets).items():
        if hasattr(linear, "lora_a"):
            raise UserError(f"add_lora: {name!r} has an adapter already")
        _adapt(linear, rank, alpha, param_dtype, rngs)
        if dropout:
            setattr(linear, DROPOUT, _stacked_dropout(dropout, linear.kernel, rngs))


@contextlib.contextmanager
def adapters_off(model: nnx.Module) -> Iterator[None]:
    """Within it a model computes as it did before ``add_lora``.

    So the base is at hand as a reference, without a second model. Calls within it need
    no gradients.

    Raises:
      UserError: the model has no adapters.
    """
    adapted = [x for _, x in nnx.iter_modules(model) if isinstance(x, _Adapted)]
    if not adapted:
        raise UserError("adapters_off: the model has no adapters; see add_lora")
    for linear in adapted:
        setattr(linear, _OFF, True)
    try:
        yield
    finally:
        for linear in adapted:
            delattr(linear, _OFF)


def _matching(
    linears: dict[str, nnx.Linear], targets: Sequence[str]
) -> dict[str, nnx.Linear]:
    found: set[str] = set()
    for pattern in targets:
        names = fnmatch.filter(linears, pattern)
        names += fnmatch.filter(linears, f"*.{pattern}")
        if not names:
            raise UserError(
                f"LoRA: the target {pattern!r} matches no linear layer; there are "
                f"{some_of(list(linears), limit=12) or 'none'}; heads and embeddings "
                "cannot have adapters"
            )
        found.update(names)
    return {name: linear for name, linear in linears.items() if name in found}


def _adapt(
    linear: Any, rank: int, alpha: float, param_dtype: Any, rngs: nnx.Rngs
) -> None:
    """Adds the matrices, and the class whose call uses them."""
    *layers, size_in, size_out = np.shape(linear.kernel.get_value())
    keys = jax.random.split(rngs.params(), int(np.prod(layers)))
    init = lambda key: _init_a(key, (size_in, rank), param_dtype)
    a = jax.lax.map(init, keys).reshape(*layers, size_in, rank)
    b = jnp.zeros((*layers, rank, size_out), param_dtype)
    object.__setattr__(linear, "__class__", _adapted_class(type(linear)))
    scale: dict[str, Any] = {ALPHA: alpha}
    for name, value in (("lora_a", a), ("lora_b", b)):
        setattr(linear, name, nnx.LoRAParam(value, **scale))
        _mark_like(linear.kernel, getattr(linear, name), name)


def _stacked_dropout(rate: float, kernel: Any, rngs: nnx.Rngs) -> Dropout:
    """Returns a Dropout that has a key and a count for each layer of a kernel."""
    dropout = Dropout(rate, rngs=rngs)
    layers = np.shape(kernel.get_value())[: layer_dims(kernel)]
    if layers:
        dropout.key.set_value(jax.random.split(dropout.key.get_value(), layers))
        dropout.count.set_value(jnp.zeros(layers, jnp.uint32))
        for name in ("key", "count"):
            _mark_like(kernel, getattr(dropout, name), DROPOUT, name)
    return dropout


def _mark_like(kernel: Any, variable: nnx.Variable, *name: str) -> None:
    """Marks the layer dimensions that a variable of the same module shares."""
    paths = kernel.get_metadata(IN_LAYER, ())
    mark_layers(variable, inner=[(*path[:-1], *name) for path in paths])


class _Adapted(nnx.Module):
    """Beside a linear layer's class, adds the adapter's product to its output."""

    def __call__(self, inputs: jax.Array, **kwargs: Any) -> jax.Array:
        linear: Any = self
        y = super().__call__(inputs, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(linear, _OFF):
            return y
        if hasattr(linear, DROPOUT):
            inputs = linear.lora_dropout(inputs)
        a, b = linear.lora_a[...], linear.lora_b[...]
        scale = linear.lora_a.get_metadata(ALPHA) / a.shape[-1]
        inputs, a, b = linear.promote_dtype((inputs, a, b), dtype=linear.dtype)
        return y + (scale * (inputs @ a @ b)).astype(y.dtype)


@functools.cache
def _adapted_class(cls: type) -> type:
    return type(cls.__name__, (_Adapted, cls), {})
