"""Loops and branches: their bodies are thunk sequences of their own; see order.py."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jshard.system.compat import jaxprs

# The results of a program, and the token after it.
Results = tuple[list[Any], jax.Array]
# (jaxpr, inputs, token, whether its collectives are tied; None if it may decide)
Run = Callable[[core.ClosedJaxpr, Sequence[Any], jax.Array, bool | None], Results]

LOOPS_AND_BRANCHES = {"scan", "while", "cond"}


def has_inner(jaxpr: core.Jaxpr) -> bool:
    """Returns whether loops or branches of a jaxpr have collectives."""
    named = [(eqn, eqn.primitive.name) for eqn in jaxpr.eqns]
    calls = [jaxprs.inner_jaxpr(eqn) for eqn, name in named if name in jaxprs.CALLS]
    loops = [eqn for eqn, name in named if name in LOOPS_AND_BRANCHES]
    inside = any(has_inner(inner.jaxpr) for inner in calls)
    return inside or jaxprs.find(loops, jaxprs.COLLECTIVES) is not None


def run_inside(run: Run, eqn: Any, values: Sequence[Any], token: jax.Array) -> Results:
    """Runs a loop or branch that carries the token; ``run`` runs its inner jaxprs.

    XLA puts a branch, or the body of a loop with one iteration, in the place of the
    operation where it can. Their collectives are tied to those around them, therefore.
    """
    params = eqn.params
    if eqn.primitive.name == "cond":
        branches = [
            lambda values, token, i=i, inner=inner: _passed_on(
                run(inner, values, token, True), i
            )
            for i, inner in enumerate(params["branches"])
        ]
        return lax.switch(values[0], branches, values[1:], token)
    if eqn.primitive.name == "scan":
        num_consts, num_carry = jaxprs.scan_sizes(eqn)
        consts, values = values[:num_consts], values[num_consts:]

        def step(state: Any, slices: list[Any]) -> tuple[Any, list[Any]]:
            carry, token = state
            inputs = [*consts, *carry, *slices]
            results, token = _passed_on(run(params["jaxpr"], inputs, token, tied))
            return (results[:num_carry], token), results[num_carry:]

        tied = None if params["length"] > params["unroll"] == 1 else True
        static = {key: params[key] for key in ("length", "reverse", "unroll")}
        state = (list(values[:num_carry]), token)
        (carry, token), ys = lax.scan(step, state, list(values[num_carry:]), **static)
        return [*carry, *ys], token
    goes_on_jaxpr, body_jaxpr, first, second = jaxprs.while_parts(eqn)
    cond_consts, body_consts = values[:first], values[first:][:second]

    def goes_on(state: Any) -> jax.Array:
        (predicate,), _ = run(goes_on_jaxpr, [*cond_consts, *state[0]], state[1], True)
        return predicate

    def body(state: Any) -> Any:
        inputs = [*body_consts, *state[0]]
        values, token = _passed_on(run(body_jaxpr, inputs, state[1], True))
        # Under vmap, the loop of each example ends at its own iteration.
        if batched:
            left = goes_on(state)
            values = [
                jnp.where(jnp.expand_dims(left, range(left.ndim, new.ndim)), new, old)
                for new, old in zip(values, state[0], strict=True)
            ]
        return values, token

    batched = goes_on_jaxpr.out_avals[0].shape
    any_goes_on = (lambda state: jnp.any(goes_on(state))) if batched else goes_on
    return lax.while_loop(any_goes_on, body, (list(values[first + second :]), token))


def _passed_on(results: Results, branch: int = 0) -> Results:
    """Returns results of a loop or branch, with a token that it seems to change.

    Without a change, the compiler could pass the token around the loop. Each branch
    makes a different change, because XLA moves operations that all branches share out
    of the conditional.
    """
    values, token = results
    return values, lax.select(token == 0, token, token + (1 + branch))
