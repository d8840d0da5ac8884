"""Gradients of weights, in the form that XLA:CPU multiplies fastest.

JAX computes the gradient of w in ``y = x @ w`` as the transpose of a product of dy and
x, summed over examples and positions. XLA:CPU copies dy with these dimensions last,
folds the transpose into the product, and then reads both operands along the wrong
dimension: on one core that takes 2.7 times as long as ``x.T @ dy`` of matrices, with
the transpose of x as an array of its own (docs/log/cpus.md, 2026-11-26).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jshard.system.compat import jaxprs


def of_weights(jaxpr: core.Jaxpr) -> dict[Any, Any]:
    """Returns products of which only the transpose is read, by its variable.

    They are matrices, and sum over all but the last dimension of both operands.
    """
    read = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
    reads = Counter(jaxprs.variables(read))
    made_by: dict[Any, Any] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.params.get("permutation") == (1, 0):
            product = made_by.get(eqn.invars[0])
            if product and _sums_first(product) and reads[eqn.invars[0]] == 1:
                found[eqn.outvars[0]] = product
    return found


def _sums_first(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    (of_a, of_b), batch = eqn.params["dimension_numbers"]
    leading = tuple(range(eqn.invars[0].aval.ndim - 1))
    return (of_a, of_b, batch) == (leading, leading, ((), ()))


def transposed(product: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """Returns the transpose of one of ``of_weights``."""
    a_NO, b_NI = (x.reshape(-1, x.shape[-1]) for x in operands)
    params = product.params
    if a_NO.size < b_NI.size:  # transposing the larger one takes longer
        return lax.optimization_barrier(_multiply(a_NO, b_NI, params)).T
    precision = params["precision"]
    if isinstance(precision, tuple):
        params = params | {"precision": precision[::-1]}
    return _multiply(b_NI, a_NO, params)


def _multiply(x_NI: jax.Array, y_NO: jax.Array, params: dict) -> jax.Array:
    """Returns ``x.T @ y``, with the transpose in memory."""
    params = params | {"dimension_numbers": (((1,), (0,)), ((), ()))}
    return lax.dot_general(lax.optimization_barrier(x_NI.T), y_NO, **params)
