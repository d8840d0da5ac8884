"""LoRA: low-rank adapters beside frozen weights (``jshard.nn.adapted`` has the math).

B is zero at first, or A beside an embedding table, so that the model starts as what it
was.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.nn import adapted
from jshard.nn.dropout import Dropout
from jshard.sharding.layout.layer_dims import IN_LAYER, layer_dims, mark_layers
from jshard.sharding.layout.values.magnitudes import MAGNITUDE
from jshard.sharding.layout.variables import replace
from jshard.sharding.units.modules import Stack, is_unit
from jshard.system.errors import UserError, some_of

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
    rank_stabilized: bool = False,
    dora: bool = False,
    ranks: Mapping[str, int] = MappingProxyType({}),
    alphas: Mapping[str, float] = MappingProxyType({}),
    layers: Mapping[str, Sequence[int]] = MappingProxyType({}),
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> None:
    """Adds adapters to layers of a model, in place.

    Each of them gets the parameters ``lora_a`` (inputs, rank) and ``lora_b`` (rank,
    outputs), of type ``nnx.LoRAParam``; those of a Stack's layers are stacked as its
    kernel is. Names and values of the other parameters stay. Give
    ``wrt=nnx.LoRAParam`` to ``FSDP.init`` to train the adapters alone.

    A layer with an adapter is a new object, in place of the layer wherever the model
    refers to it. Layers are ``nnx.Linear``, ``nnx.Embed``, whose inputs are the
    vocabulary, and experts: modules with a ``kernel`` (experts, inputs, outputs) and a
    method ``product(x, kernel, *args)``, which their call applies. A table with an
    adapter is gathered whole. A model that reads the kernel of its head itself reads
    ``jshard.nn.kernel_of(head)``.

    Args:
      model: the model, whose class may be anything.
      rank: of the product of both matrices.
      alpha: the product is scaled by ``alpha / rank``.
      targets: patterns of module paths, without the layer index of Stacks: "*" is every
        ``nnx.Linear`` that is no Unit of its own (as heads are), "attention.q", "head"
        or "attention.*" those whose path is, or ends with, something like it.
      dropout: rate of the dropout of the adapters' inputs, but for embeddings.
      rank_stabilized: scales by ``alpha / sqrt(rank)`` instead (rsLoRA).
      dora: trains a magnitude for each output besides, ``lora_m`` (outputs,) (DoRA).
      ranks: other ranks, by the paths of modules.
      alphas: other alphas, likewise.
      layers: the indices of the layers in a Stack that alone have adapters, likewise;
        () is none. The matrices of the others are zero, and so are their gradients.
      param_dtype: of the adapters.
      rngs: random streams for initial values and for dropout.

    Raises:
      UserError: a rank is below 1, a pattern matches no layer, or what it matches is
        the model itself or cannot have dropout, magnitudes or layers without adapters.
    """
    if (least := min((rank, *ranks.values()))) < 1:
        raise UserError(f"add_lora: rank={least} must be at least 1")
    modules: dict[str, Any] = {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, (nnx.Linear, nnx.Embed)) or _has_experts(module)
        if not isinstance(module, Stack)
    }
    layers_with: dict[int, Any] = {}
    for name, layer in _matching(modules, targets).items():
        if not layers.get(name, (0,)):
            continue
        if layer is model:
            raise UserError("add_lora: the model is itself a layer; put it in a module")
        if hasattr(layer, adapted.A):
            raise UserError(f"add_lora: {name!r} has an adapter already")
        linear = isinstance(layer, nnx.Linear)
        if dora and not linear:
            raise UserError(f"add_lora: dora is for linear layers, unlike {name!r}")
        if dropout and _has_experts(layer):
            raise UserError(f"add_lora: dropout is not for experts, as {name!r} is")
        _add_matrices(layer, ranks.get(name, rank), param_dtype, rngs)
        a = getattr(layer, adapted.A)
        a.set_metadata(adapted.ALPHA, alphas.get(name, alpha))
        a.set_metadata(adapted.STABILIZED, rank_stabilized)
        if name in layers:
            _leave_out(name, layer, layers[name], dora)
        if dora:
            norms = adapted.column_norms(adapted.weight_of(layer).get_value())
            _add(layer, MAGNITUDE, norms.astype(param_dtype))
        if dropout and linear:
            noise = _stacked_dropout(dropout, adapted.weight_of(layer), rngs)
            setattr(layer, adapted.DROPOUT, noise)
        layers_with[id(layer)] = adapted.adapt(layer)
    if not layers_with:
        raise UserError("add_lora: no layer is left that is to have an adapter")
    replace(model, layers_with)


def _has_experts(module: nnx.Module) -> bool:
    return hasattr(module, "product") and hasattr(module, "kernel")


def _matching(layers: Mapping[str, Any], targets: Sequence[str]) -> dict[str, Any]:
    found: set[str] = set()
    for pattern in targets:
        names = fnmatch.filter(layers, pattern) + fnmatch.filter(layers, f"*.{pattern}")
        if pattern == "*":
            linears = (x for x in names if isinstance(layers[x], nnx.Linear))
            names = [x for x in linears if not is_unit(layers[x])]
        if not names:
            raise UserError(
                f"LoRA: the target {pattern!r} matches no layer that can have "
                f"adapters; there are {some_of(list(layers), limit=12) or 'none'}"
            )
        found.update(names)
    return {name: layer for name, layer in layers.items() if name in found}


def _add_matrices(layer: Any, rank: int, param_dtype: Any, rngs: nnx.Rngs) -> None:
    *layers, size_in, size_out = np.shape(adapted.weight_of(layer).get_value())
    a, b = (*layers, size_in, rank), (*layers, rank, size_out)
    if isinstance(layer, nnx.Embed):
        _add(layer, adapted.A, jnp.zeros(a, param_dtype))
        _add(layer, adapted.B, jax.random.normal(rngs.params(), b, param_dtype))
        return
    keys = jax.random.split(rngs.params(), int(np.prod(layers)))
    init = lambda key: _init_a(key, a[-2:], param_dtype)
    _add(layer, adapted.A, jax.lax.map(init, keys).reshape(a))
    _add(layer, adapted.B, jnp.zeros(b, param_dtype))


def _leave_out(name: str, layer: Any, indices: Sequence[int], dora: bool) -> None:
    """Sets the A of a Stack's other layers to zero, as B is, and says which it has."""
    a = getattr(layer, adapted.A)
    value = a.get_value()
    if layer_dims(a) != 1 or dora:
        why = "with DoRA all have them" if dora else "it is not in one Stack"
        raise UserError(
            f"add_lora: {name!r} cannot have adapters in some layers alone: {why}"
        )
    if min(indices) < 0 or max(indices) >= value.shape[0]:
        raise UserError(
            f"add_lora: {name!r} has layers 0 to {value.shape[0] - 1}, not all of "
            f"{', '.join(map(str, indices))}"
        )
    has_one = np.isin(np.arange(value.shape[0]), indices)
    a.set_value(value * has_one.reshape(-1, *[1] * (value.ndim - 1)))
    a.set_metadata(adapted.LAYERS, tuple(indices))


def _add(layer: Any, name: str, value: jax.Array) -> None:
    setattr(layer, name, nnx.LoRAParam(value))
    _mark_like(adapted.weight_of(layer), getattr(layer, name), name)


def _stacked_dropout(rate: float, kernel: Any, rngs: nnx.Rngs) -> Dropout:
    """Returns a Dropout that has a key and a count for each layer of a kernel."""
    dropout = Dropout(rate, rngs=rngs)
    layers = np.shape(kernel.get_value())[: layer_dims(kernel)]
    if layers:
        dropout.key.set_value(jax.random.split(dropout.key.get_value(), layers))
        dropout.count.set_value(jnp.zeros(layers, jnp.uint32))
        for name in ("key", "count"):
            _mark_like(kernel, getattr(dropout, name), adapted.DROPOUT, name)
    return dropout


def _mark_like(kernel: Any, variable: nnx.Variable, *name: str) -> None:
    """Marks the layer dimensions that a variable of the same module shares."""
    paths = kernel.get_metadata(IN_LAYER, ())
    mark_layers(variable, inner=[(*path[:-1], *name) for path in paths])
