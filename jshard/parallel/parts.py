"""Exchanges of some examples beside the computation of others, for ``tensor.py``.

Examples are independent. Where collectives run beside products, as on GPUs, a layer's
exchanges before and after its computation are made in two parts, so that one part is
computed with while the other travels.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.fsdp.mesh import on_gpus
from jshard.fsdp.precision import is_float

_PARTS = 2  # four hide no more (docs/log.md)


def in_parts(
    send: Callable[[Any], Any],
    compute: Callable[[Any], Any],
    bring_back: Callable[[Any], Any],
    inputs: Any,
    tokens: tuple[int, ...],
) -> Any:
    """Computes ``bring_back(compute(send(inputs)))``, in parts of the examples.

    Args:
      send: a collective that brings what ``compute`` needs.
      compute: maps it to arrays that begin with as many examples.
      bring_back: a collective on these, which keeps the examples.
      inputs: a pytree; arrays that begin with the dimensions ``tokens`` are split.
      tokens: examples, and tokens of each.
    """
    number = math.gcd(tokens[0], _PARTS) if on_gpus() else 1
    sent: list[Any] = []
    for index in range(number):
        part = _part(inputs, tokens, index, number)
        if sent:
            part, sent[-1] = _in_turn(part, sent[-1])
        sent.append(send(part))
    results: list[Any] = []
    for part in sent:
        result = compute(part)
        if results:
            result, results[-1] = _in_turn(result, results[-1])
        results.append(bring_back(result))
    if number == 1:
        return results[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _part(inputs: Any, tokens: tuple[int, ...], index: int, number: int) -> Any:
    if number == 1:
        return inputs
    size = tokens[0] // number

    def own(x: Any) -> Any:
        of_tokens = jnp.shape(x)[:2] == tokens
        return x[index * size : (index + 1) * size] if of_tokens else x

    return jax.tree.map(own, inputs)


def _in_turn(tree: Any, before: Any) -> tuple[Any, Any]:
    """Returns both; the collectives of ``tree`` wait for ``before``.

    XLA would combine them otherwise, and wait for all. Only what has gradients waits,
    so that the backward waits, too.
    """
    leaves, structure = jax.tree.flatten((tree, before))
    floating = [is_float(jnp.asarray(x)) for x in leaves]
    passed = iter(
        lax.optimization_barrier(
            tuple(x for x, f in zip(leaves, floating, strict=True) if f)
        )
    )
    leaves = [next(passed) if f else x for x, f in zip(leaves, floating, strict=True)]
    return jax.tree.unflatten(structure, leaves)
