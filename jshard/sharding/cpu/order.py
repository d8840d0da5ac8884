"""Orders collectives on CPUs by data dependencies, the same way on every device.

XLA:CPU runs thunks as soon as they are ready. It starts the collectives of one thunk
sequence in order, but with scheduling edges, not execution edges
(xla/runtime/execution_graph.h). A loop therefore counts as started before the
collectives inside it have started, and later collectives may overtake them. In a
program loaded from the compilation cache, the collectives in a loop are not ordered
with those around it at all, because each thunk sequence gets its own communicator
(xla/backends/cpu/runtime/thunk_proto_serdes.cc). Devices may then enter different
collectives under the same key, and hang or receive each other's data. Only data
dependencies always enforce an order.

A sequence without loops or branches that have collectives, such as the body of most
loops, is left alone since JAX 0.11, whose XLA obeys barriers. All others read a token
that ``in_order`` threads through the program: an integer that is always 0, which the
compiler cannot know. Inside ``shard_map``, where
collectives are explicit, each reads what the previous one wrote. Outside it, XLA's
partitioner may turn any operation into a collective, so that operations with a sequence
of their own run one at a time: what one of them needs runs before it, and all else
after it. Values stay the same, bit for bit, apart from gradients of weights, which are
multiplied in another order (weight_products.py).

GPUs do not need this: each device runs a single schedule, one thunk at a time
(xla/backends/gpu/runtime/sequential_thunk.cc).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jshard.sharding.cpu import weight_products
from jshard.sharding.cpu.inner_sequences import (
    LOOPS_AND_BRANCHES,
    Results,
    has_inner,
    run_inside,
)
from jshard.system.compat import jaxprs
from jshard.system.compat.xla_options import BARRIERS_HOLD_ON_CPUS
from jshard.system.errors import UserError

_SEQUENCES = LOOPS_AND_BRANCHES | {"shard_map"}
_OPENED = LOOPS_AND_BRANCHES | jaxprs.CALLS.keys()  # the chain goes through these


def in_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn`` with its collectives in one order, for ``jit`` on CPUs.

    Take derivatives inside ``fn``, not of the returned function.

    Args:
      fn: a function of pytrees of arrays. One of these must be an integer scalar, such
        as a step or a seed.

    Raises:
      UserError: when called without an integer scalar among the arguments.
    """

    @functools.wraps(fn)
    def ordered(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs, _ = _take_turns(closed, leaves, _zero(leaves))
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    return ordered


def _zero(leaves: Iterable[Any]) -> jax.Array:
    """Returns a zero that the compiler cannot fold.

    An integer's population count is below 256, so its bits from the eighth up are 0.
    """
    for x in leaves:
        if jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer):
            bits = lax.population_count(jnp.asarray(x)).astype(jnp.int32)
            return lax.shift_right_logical(bits, jnp.int32(8))
    raise UserError("in_order: needs an integer among its arguments, such as the step")


# Operations on the token. They leave all values unchanged, because it is 0.


def _here(token: jax.Array, last: Sequence[jax.Array]) -> jax.Array:
    """Returns True, as a value that depends on the token and on ``last``."""
    true = token == 0
    for x in last:
        true |= _first(x).reshape(()) != 0
    if len(last) < 2:
        return true
    # XLA copies cheap operations into every fusion that reads them, but no remainder.
    zero = lax.select(true, token, jnp.ones_like(token))
    return lax.rem(zero, token + 2) == 0


def _first(x: jax.Array) -> jax.Array:
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)


def _tie(x: jax.Array, here: jax.Array) -> jax.Array:
    """Makes ``x`` depend on ``here`` by rewriting its first element in place."""
    if not x.size:
        return x
    written = _select(here, _first(x))
    return lax.dynamic_update_slice(x, written, (0,) * x.ndim)


def _select(here: jax.Array, x: jax.Array) -> jax.Array:
    return lax.select(here, x, lax.full_like(x, 0))


# Inside shard_map: one chain of collectives.


def _chain(
    jaxpr: core.ClosedJaxpr,
    inputs: Sequence[Any],
    token: jax.Array,
    tied: bool | None = None,
) -> Results:
    """Runs a jaxpr on one device's values.

    If ``tied``, each collective reads what the previous one wrote; None decides, for a
    thunk sequence. Loops and calls are traced again, because a user's own ``shard_map``
    may have typed the original inner jaxprs with the axes over which values vary.
    """
    if tied is None:
        tied = not BARRIERS_HOLD_ON_CPUS or has_inner(jaxpr.jaxpr)
    env = jaxprs.environment(jaxpr, inputs)
    last: list[jax.Array] = []  # results of the previous collective
    # Variables that depend on the latest run of sums; None after another collective.
    sums: set[Any] | None = None
    here = token == 0
    gradients = weight_products.of_weights(jaxpr.jaxpr)
    multiplied_there = jaxprs.made_by(gradients.values())
    for eqn in jaxpr.jaxpr.eqns:
        if not multiplied_there.isdisjoint(eqn.outvars):
            continue
        product = gradients.get(eqn.outvars[0]) if eqn.outvars else None
        operands = (product or eqn).invars
        name, values = eqn.primitive.name, jaxprs.read(env, operands)
        exchanges = jaxprs.has(eqn, jaxprs.COLLECTIVES)
        # Independent sums stay adjacent, so that XLA can combine them.
        apart = sums is not None and sums.isdisjoint(jaxprs.variables(operands))
        joins = name in jaxprs.SUMS and apart
        if tied and exchanges and not joins:
            here, sums = _here(token, last), set() if name in jaxprs.SUMS else None
        with jaxprs.context(eqn):
            if name in jaxprs.COLLECTIVES and not tied:
                results = _collective(eqn, values)
            elif name in jaxprs.COLLECTIVES:
                operands = [_tie(jnp.asarray(x), here) for x in values]
                results = _collective(eqn, operands)
                last = [x for x in results if x.size] + (last if joins else [])
                if name in jaxprs.SUMS and not joins:
                    here = _here(token, [x for x in operands if x.size])
            elif name == "pvary":
                results = values
            elif name in _OPENED and exchanges and tied:
                token = lax.select(here, token, jnp.ones_like(token))
                results, token = _inside(eqn, values, token, tied)
                last = []
            elif name in _OPENED:
                results, _ = _inside(eqn, values, token, tied)
            elif product:
                results = [weight_products.transposed(product, values)]
            elif exchanges:
                raise UserError(
                    f"collectives inside of {name} cannot be put in the one order that "
                    "CPUs need; move them out of it"
                )
            else:
                results = jaxprs.bind(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
        if sums is not None and (exchanges or not apart):
            sums.update(eqn.outvars)
    if tied:
        token = lax.select(_here(token, last), token, jnp.ones_like(token))
    return jaxprs.read(env, jaxpr.jaxpr.outvars), token


def _collective(eqn: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a collective; variants for invariant results as the plain one.

    Values are not typed by the axes over which they vary.
    """
    params = eqn.params
    if eqn.primitive.name == "psum_invariant":
        return list(lax.psum(tuple(values), params["axes"]))
    if eqn.primitive.name == "all_gather_invariant":
        axis, tiled = params["all_gather_dimension"], params["tiled"]
        (x,) = values
        return [lax.all_gather(x, params["axis_name"], axis=axis, tiled=tiled)]
    return jaxprs.bind(eqn, values)


def _inside(eqn: Any, values: Sequence[Any], token: jax.Array, tied: bool) -> Results:
    if eqn.primitive.name == "remat2":
        return _remat(eqn, values, token, tied)
    if eqn.primitive.name in jaxprs.CALLS:
        return _chain(jaxprs.inner_jaxpr(eqn), values, token, tied)
    return run_inside(_chain, eqn, values, token)


def _remat(eqn: Any, values: Sequence[Any], token: jax.Array, tied: bool) -> Results:
    """Rebuilds a ``jax.checkpoint`` equation: XLA would merge an inlined one."""
    inputs = [*values, token]

    def run(*inputs: Any) -> list[Any]:
        inner = jaxprs.inner_jaxpr(eqn)
        results, token = _chain(inner, inputs[:-1], inputs[-1], tied)
        return [*results, token]

    traced = jax.make_jaxpr(run)(*inputs)
    inner = jaxprs.consts_as_inputs(traced, inputs, traced.consts)
    params = eqn.params | {"jaxpr": inner}
    *results, token = eqn.primitive.bind(*inputs, *traced.consts, **params)
    return results, token


# Outside shard_map: one thunk sequence at a time.


def _has_sequence(eqn: Any) -> bool:
    """Returns whether an operation may have collectives in a sequence of its own."""
    inside = eqn.primitive.name == "shard_map" and has_inner(eqn.params["jaxpr"])
    return inside or eqn.primitive.name in LOOPS_AND_BRANCHES


def _take_turns(
    jaxpr: core.ClosedJaxpr,
    inputs: Sequence[Any],
    token: jax.Array,
    tied: bool | None = None,
) -> Results:
    """Runs a jaxpr on global values; if ``tied``, one thunk sequence at a time."""
    calls = [e for e in jaxpr.jaxpr.eqns if e.primitive.name in jaxprs.CALLS]
    if jaxprs.find(calls, _SEQUENCES):
        jaxpr = jaxprs.flat_jaxpr(jaxpr, inputs)
    jaxpr = jaxprs.without_unused(jaxpr)  # the token would keep dead collectives alive
    if tied is None:
        inner = any(map(_has_sequence, jaxpr.jaxpr.eqns))
        tied = not BARRIERS_HOLD_ON_CPUS or inner
    env = jaxprs.environment(jaxpr, inputs)
    outputs = jaxpr.jaxpr.outvars
    left = dict(enumerate(jaxpr.jaxpr.eqns))
    maker = {v: i for i, eqn in left.items() for v in eqn.outvars}

    def needed(wanted: Iterable[Any]) -> list[int]:
        """Returns the indices of equations that ``wanted`` still needs, in order."""
        found: set[int] = set()
        stack = jaxprs.variables(wanted)
        while stack:
            index = maker.get(stack.pop())
            if index in left and index not in found:
                found.add(index)
                stack += jaxprs.variables(left[index].invars)
        return sorted(found)

    for index in [i for i, e in left.items() if e.primitive.name in _SEQUENCES]:
        jaxprs.evaluate([left.pop(i) for i in needed(left[index].invars)], env)
        eqn = left.pop(index)
        values = jaxprs.read(env, eqn.invars)
        with jaxprs.context(eqn):
            if eqn.primitive.name == "shard_map":
                inner = core.ClosedJaxpr(eqn.params["jaxpr"], ())
                chain = lambda token, *values, j=inner: _chain(j, values, token)
                results, token = jaxprs.shard_map_again(eqn, chain)(token, *values)
            else:
                results, token = run_inside(_take_turns, eqn, values, token)
        env.update(zip(eqn.outvars, results, strict=True))
        if not tied:
            continue
        # All later operations wait, and so do the collectives that the partitioner
        # makes of them: all elements, because only some devices hold the first one.
        later = jaxprs.read_by(left.values()).union(jaxprs.variables(outputs))
        for v in filter(later.__contains__, list(env)):  # in a deterministic order
            if jax.typeof(env[v]).memory_space != jax.memory.Space.Host:
                env[v] = _select(token == 0, env[v])
    jaxprs.evaluate(left.values(), env)
    return jaxprs.read(env, outputs), token
