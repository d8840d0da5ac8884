"""Jaxprs: which equations read and make what, and how to run a few of them.

Jaxprs are no part of JAX's stable interface. ``jax.extend.core`` is public, and the
same on JAX 0.10.2, 0.11.2 and 0.12.0.1; what differs between these, or comes from
``jax.interpreters``, is here: names of primitives, of their parameters, what an
equation was traced in, and the removal of dead code. When it breaks, steps cannot be
traced; what is only misread shows as another number of collectives, or of residuals.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec

# Calls that only group equations; where nothing is differentiated, custom rules do too.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the name of closed_call since JAX 0.11.1
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def read_by(eqns: Iterable[Any]) -> set[Any]:
    """The variables that equations read."""
    return {v for eqn in eqns for v in variables(eqn.invars)}


def made_by(eqns: Iterable[Any]) -> set[Any]:
    """The variables that equations make."""
    return {v for eqn in eqns for v in eqn.outvars}


def contains(jaxpr: core.Jaxpr, names: set[str]) -> bool:
    """Whether one of these primitives is in a jaxpr, however deep."""
    return any(has(eqn, names) for eqn in jaxpr.eqns)


def has(eqn: Any, names: set[str]) -> bool:
    """Whether an equation is, or holds, one of these primitives."""
    inner = core.jaxprs_in_params(eqn.params)
    return eqn.primitive.name in names or any(contains(j, names) for j in inner)


def read(env: dict[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """The values of variables, from ``env``, and of literals."""
    return [a.val if isinstance(a, core.Literal) else env[a] for a in atoms]


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def context(eqn: Any) -> Iterator[None]:
    """What an equation was traced in: its settings, and the scopes of its name."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if scopes := str(eqn.source_info.name_stack):
            stack.enter_context(jax.named_scope(scopes))
        yield


def evaluate(
    eqns: Iterable[Any], env: dict[Any, Any], outputs: Sequence[Any] = ()
) -> list:
    """Runs equations on the values in ``env``, which theirs join; reads ``outputs``."""
    for eqn in eqns:
        with context(eqn):
            results = bind(eqn, read(env, eqn.invars))
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(jnp.asarray, read(env, outputs)))


def flat_jaxpr(fn: Callable, leaves: Sequence[Any]) -> core.ClosedJaxpr:
    """The jaxpr of ``fn(*leaves)``, a list of arrays, with calls inlined."""
    closed = jax.make_jaxpr(fn)(*leaves)

    def inlined(*leaves: Any) -> list[Any]:
        return _inline(closed.jaxpr, closed.consts, leaves)

    return jax.make_jaxpr(inlined)(*leaves)


def _inline(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= zip(jaxpr.invars, inputs, strict=True)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in CALLS:
            evaluate([eqn], env)
            continue
        inner = inner_jaxpr(eqn)
        with context(eqn):
            results = _inline(inner.jaxpr, inner.consts, read(env, eqn.invars))
        env.update(zip(eqn.outvars, results, strict=True))
    return read(env, jaxpr.outvars)


def inner_jaxpr(call: Any) -> core.ClosedJaxpr:
    """What an equation of ``CALLS`` calls."""
    inner = call.params[CALLS[call.primitive.name]]
    return core.ClosedJaxpr(inner, ()) if isinstance(inner, core.Jaxpr) else inner


def open_inner(eqn: Any) -> core.Jaxpr | None:
    """The one program inside of an equation, if that takes its inputs as they are."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    takes_all = isinstance(inner, core.Jaxpr) and len(inner.invars) == len(eqn.invars)
    return inner if takes_all else None


def shard_map_again(eqn: Any, fn: Callable) -> Callable:
    """A ``shard_map`` like that of an equation, of another function.

    Args:
      eqn: of a ``shard_map`` of some number of arrays.
      fn: ``fn(replicated, *arrays)``, which returns a list of outputs like theirs and
        one more replicated array. Types of varying values are not checked.
    """
    params = eqn.params
    return jax.shard_map(
        fn,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec()),
        axis_names=params["newly_manual_axes"],
        check_vma=False,
    )


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many constants enter a ``scan``, and how many values its carry has.

    Inputs are constants, carry and slices, outputs are carry and slices; a slice has a
    dimension less inside. (What else says so changes with the version of JAX.)
    """
    body = scan_body(eqn)
    num_carry = sum(map(_same_rank, eqn.outvars, body.outvars))
    return sum(map(_same_rank, eqn.invars, body.invars)) - num_carry, num_carry


def scan_body(eqn: Any) -> core.Jaxpr:
    """What a ``scan`` does each time."""
    return getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])


def _same_rank(outside: Any, inside: Any) -> bool:
    return outside.aval.ndim == inside.aval.ndim


def without_dead_code(fn: Callable) -> Callable:
    """``fn`` on a flat list of arrays, less what its outputs do not need."""

    def run(*leaves: Any) -> list[Any]:
        traced = jax.make_jaxpr(fn)(*leaves)

        def hoisted(consts: Any, leaves: Any) -> list[Any]:
            closed = core.ClosedJaxpr(traced.jaxpr, consts)
            return core.jaxpr_as_fun(closed)(*leaves)

        jaxpr = jax.make_jaxpr(hoisted)(traced.consts, leaves).jaxpr
        jaxpr, used = needed_for(jaxpr, [True] * len(jaxpr.outvars))
        return run_used(jaxpr, used, [*traced.consts, *leaves])

    return run


def needed_for(
    jaxpr: core.Jaxpr, outputs: Sequence[bool]
) -> tuple[core.Jaxpr, list[bool]]:
    """The part of a jaxpr that some of its outputs need, and which inputs that uses."""
    return pe.dce_jaxpr(jaxpr, list(outputs))


def without_unused(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A program less the equations and constants that nobody reads; inputs all stay."""
    used = [True] * len(closed.jaxpr.outvars)
    inner, consts, _ = pe.dce_jaxpr_consts(closed.jaxpr, used, instantiate=True)
    live = [x for x, is_used in zip(closed.consts, consts, strict=True) if is_used]
    return core.ClosedJaxpr(inner, live)


def run_used(jaxpr: Any, used: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    """What a jaxpr without its dead code computes of those inputs that it uses."""
    needed = [x for x, u in zip(inputs, used, strict=True) if u]
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*needed)
