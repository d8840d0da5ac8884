"""Products whose columns and rows are split over the mesh axis "tensor".

Between these, each device has a part of the sequence, as over "context". Around them
the devices exchange tokens for features: an all-gather brings each one the tokens of
all, it computes with its heads or hidden features, and a reduce-scatter sums what all
have computed and leaves each one its tokens (Megatron-LM's sequence parallelism,
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The backward has the same
collectives in the other order. Where collectives run beside products, as on GPUs, they
are made in two parts, because examples are independent: one part is computed with while
the other travels.

Shape suffixes: B batch, T time of this device, S time of the devices of "tensor",
V columns of this device.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jshard.sharding.layout.splits import Split
from jshard.sharding.layout.variables import of_class, replace
from jshard.sharding.settings.mesh import (
    TENSOR,
    on_gpus,
    sequence_axes,
    shared_axes,
    split_sequences,
)
from jshard.sharding.settings.precision import is_float
from jshard.sharding.settings.scopes import BESIDE_TOKENS, TENSOR_PARALLEL
from jshard.system.compat.flax_modules import Derived, derived
from jshard.system.errors import UserError

_PARTS = 2  # four hide no more (docs/log/axes_and_pipelines.md)


def tensor_parallel(
    fn: Callable[..., Any],
    x_BTD: Any,
    *args: Any,
    tokens: Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Computes ``fn(x, ...)`` with parts of its weights on the devices of "tensor".

    ``fn`` ends with products of split rows (``jshard.nn.Split``), whose sums over the
    device's features this function adds up over devices. What follows these products in
    ``fn`` must be linear in them, without anything added. Without the axis, and where
    sequences are not split, this is ``fn(x, ...)``.

    Args:
      fn: maps the tokens of all devices of "tensor", (B, S, ...), to (B, S, ...).
      x_BTD: this device's tokens.
      *args: further arguments of ``fn``.
      tokens: the names of those arguments of ``fn`` whose arrays have this device's
        tokens, too, (B, T, ...), for each of which it gets the tokens of all devices.
        It gets the others as they are.
      **kwargs: further arguments of ``fn``.

    Returns:
      What ``fn`` returns, for this device's tokens.

    Raises:
      UserError: ``fn`` returns arrays without the dimensions (B, S); it has no argument
        of a name in ``tokens``, or an array of one does not begin with (B, T); or
        ``tokens`` is not given, and an array of an argument begins so.
    """
    if TENSOR not in sequence_axes() or lax.axis_size(TENSOR) == 1:
        return fn(x_BTD, *args, **kwargs)
    axes = tuple(axis for axis in sequence_axes() if axis != TENSOR)
    first, *_ = names = _names(fn, 1 + len(args))
    given = dict(zip(names, (x_BTD, *args), strict=True)) | kwargs
    of_tokens = _of_tokens(given, tokens)
    B = x_BTD.shape[0]
    number = math.gcd(B, _PARTS) if on_gpus() else 1

    def part(index: int) -> dict[str, Any]:
        some = slice(index * (B // number), (index + 1) * (B // number))
        own = lambda x, yes: x[some] if yes and number > 1 else x
        return jax.tree.map(own, given, of_tokens)

    @jax.named_scope(TENSOR_PARALLEL)
    def send(inputs: dict[str, Any]) -> dict[str, Any]:
        gather = functools.partial(lax.all_gather, axis_name=TENSOR, axis=1, tiled=True)
        own = lambda x, yes: gather(x) if yes else x
        with jax.named_scope(BESIDE_TOKENS):
            others = {k: x for k, x in inputs.items() if k != first}
            sent = {k: jax.tree.map(own, x, of_tokens[k]) for k, x in others.items()}
        return {first: gather(inputs[first]), **sent}

    def compute(inputs: dict[str, Any]) -> Any:
        x_BSD, *others = (inputs[name] for name in names)
        with split_sequences(axes):
            result = fn(x_BSD, *others, **{name: inputs[name] for name in kwargs})
        for y in jax.tree.leaves(result):
            if jnp.shape(y)[:2] != x_BSD.shape[:2] or not is_float(y):
                raise UserError(
                    f"tensor_parallel: fn returns {jax.typeof(y)}; it must return "
                    f"floating arrays that begin with {list(x_BSD.shape[:2])}, as its "
                    "input does"
                )
        return result

    @jax.named_scope(TENSOR_PARALLEL)
    def bring_back(result: Any) -> Any:
        scatter = functools.partial(lax.psum_scatter, scatter_dimension=1, tiled=True)
        return jax.tree.map(lambda y_BSD: scatter(y_BSD, TENSOR), result)

    sent = _in_turn(send, map(part, range(number)))
    results = _in_turn(bring_back, map(compute, sent))
    if number == 1:
        return results[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _names(fn: Callable[..., Any], number: int) -> list[str]:
    """Returns the names of so many positional arguments: "1", "2", ... in ``*args``."""
    parameters = inspect.signature(fn).parameters.values()
    named = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return (named + list(map(str, range(number)))[len(named) :])[:number]


def _of_tokens(
    inputs: Mapping[str, Any], tokens: Sequence[str] | None
) -> dict[str, Any]:
    """Returns which arrays of the arguments, by name, have tokens; the first has.

    Raises:
      UserError: as ``tensor_parallel``.
    """
    first, *others = inputs
    said, begin = tuple(tokens or ()), inputs[first].shape[:2]
    if unknown := [name for name in said if name not in others]:
        raise UserError(
            f"tensor_parallel: tokens={said}, but fn is given no {unknown[0]!r} beside "
            f"{first!r}; it is given {', '.join(others) or 'nothing'}"
        )
    for name in others:
        for x in jax.tree.leaves(inputs[name]):
            begins_so = np.shape(x)[:2] == begin
            if tokens is None and begins_so:
                raise UserError(
                    f"tensor_parallel: the argument {name!r} of fn, {jax.typeof(x)}, "
                    f"begins like its tokens, {list(begin)}: say tokens=({name!r},) if "
                    "it is of tokens, and tokens=() if it is the same for all of them"
                )
            if name in said and not begins_so:
                raise UserError(
                    f"tensor_parallel: tokens={said}, but {name!r} is {jax.typeof(x)}; "
                    f"what is of tokens begins with {list(begin)}, as {first!r} does"
                )
    return {
        name: jax.tree.map(lambda _, yes=name == first or name in said: yes, tree)
        for name, tree in inputs.items()
    }


def _in_turn(exchange: Callable[[Any], Any], parts: Iterable[Any]) -> list[Any]:
    """Maps a collective over parts, each of which waits for the one before.

    XLA would combine them otherwise, and wait for all. Only what has gradients waits,
    so that the backward waits, too.
    """
    done: list[Any] = []
    for part in parts:
        if done:
            leaves, structure = jax.tree.flatten((part, done[-1]))
            waits = [i for i, x in enumerate(leaves) if is_float(jnp.asarray(x))]
            passed = lax.optimization_barrier([leaves[i] for i in waits])
            for i, x in zip(waits, passed, strict=True):
                leaves[i] = x
            part, done[-1] = jax.tree.unflatten(structure, leaves)
        done.append(exchange(part))
    return done


_Layer = TypeVar("_Layer", nnx.Linear, nnx.RMSNorm)


def own_columns(layer: _Layer, sizes: Sequence[int]) -> _Layer:
    """Returns a layer with this device's columns of each of its fused projections.

    Its weights are gathered whole, because no device's columns are next to each other.
    Outside of ``tensor_parallel`` this is ``layer`` itself.

    Args:
      layer: its output is that of several projections, side by side.
      sizes: the features of each projection.

    Raises:
      UserError: "tensor" does not divide a size; or the weights are in float8.
    """
    if not within_tensor_parallel():
        return layer
    n, index = lax.axis_size(TENSOR), lax.axis_index(TENSOR)
    if any(size % n for size in sizes):
        raise UserError(
            f"mesh: tensor={n} does not divide the fused projections of "
            f"{list(sizes)} features; choose a divisor"
        )

    def own(path: tuple, variable: nnx.Variable) -> nnx.Variable:
        if path[-1] == "lora_a":  # the columns are those of lora_b
            return variable
        parts, start, x = [], 0, variable.get_value()
        if not isinstance(x, jax.Array):
            raise UserError(
                f"mesh: tensor={n} divides the fused projections of {list(sizes)} "
                "features, which cannot multiply in float8; give their layer "
                "products=None (policy.overrides)"
            )
        for size in sizes:
            first = start + index * (size // n)
            parts.append(lax.dynamic_slice_in_dim(x, first, size // n, -1))
            start += size
        return variable.copy(jnp.concatenate(parts, axis=-1))

    graphdef, state = nnx.split(layer)
    return nnx.merge(graphdef, nnx.map_state(own, state))


def norm_columns(norm: nnx.RMSNorm, x_BSE: jax.Array) -> jax.Array:
    """Normalises features of which each device of "tensor" has as many.

    Args:
      norm: its scale has all features; outside of ``tensor_parallel`` so has ``x_BSE``.
      x_BSE: this device's features.
    """
    if within_tensor_parallel():
        norm = own_columns(norm, [norm.num_features])
        norm.axis_name = TENSOR
    return norm(x_BSE)


def within_tensor_parallel() -> bool:
    """Returns whether what is traced is inside of a ``tensor_parallel`` that splits."""
    return TENSOR in shared_axes() and TENSOR not in sequence_axes()


def with_all_columns(
    fn: Callable[[jax.Array], jax.Array], x_BTD: jax.Array
) -> jax.Array:
    """Computes ``fn``, whose weights' columns are split, with all columns.

    Args:
      fn: maps (B, S, D) to (B, S, V).
      x_BTD: this device's tokens.

    Returns:
      All columns of this device's tokens, (B, T, V times the devices of "tensor").
    """
    x_BSD = lax.all_gather(x_BTD, TENSOR, axis=1, tiled=True)
    return lax.all_to_all(fn(x_BSD), TENSOR, 1, 2, tiled=True)


def make_parallel(model: nnx.Module, splits: Mapping[tuple, Split]) -> None:
    """Lets the modules at these paths be called within ``tensor_parallel``."""
    parallel = {}
    for path, module in nnx.iter_modules(model):
        if split := splits.get(tuple(map(str, path))):
            tokens = split.tokens and tuple(split.tokens)
            parallel[id(module)] = of_class(
                module, _parallel_class(type(module), tokens)
            )
    replace(model, parallel)


@functools.cache
def _parallel_class(cls: type, tokens: tuple[str, ...] | None) -> type:
    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        fn = functools.partial(cls.__call__, self)
        return tensor_parallel(fn, x, *args, tokens=tokens, **kwargs)

    return derived(cls.__name__, (Derived, cls), {"__call__": call})
