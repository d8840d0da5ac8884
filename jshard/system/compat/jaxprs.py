"""Reads, evaluates and transforms jaxprs.

Jaxprs are not part of JAX's stable API. ``jax.extend.core`` is public and identical in
JAX 0.10.2, 0.11.2 and 0.12.0.1. This module holds what differs between these versions
or comes from ``jax.interpreters``: the names of primitives and of their parameters, the
context in which an equation was traced, and dead code elimination. If it breaks, steps
cannot be traced. If it only misreads a jaxpr, the numbers of collectives or residuals
change; a collective that is renamed is missing from the start-up note, and from the
order in which CPUs must run collectives, so that a step there could hang.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec

# Primitives that only call another jaxpr, with the parameter that holds it. Calls with
# custom derivative rules qualify because nothing is differentiated after inlining.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the name of closed_call since JAX 0.11.1
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}

SUMS = {"pmax", "pmin", "psum", "psum_invariant"}
COLLECTIVES = SUMS | {
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
    "reduce_scatter",
}


# Pallas kernels. JAX's removal of dead code keeps them, and all that they read.
KERNELS = {"pallas_call", "mpmd_map"}


def axes_of(eqn: Any) -> tuple[Any, ...]:
    """Returns the mesh axes that a collective runs over."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


def groups_of(eqn: Any) -> list[list[int]] | None:
    """Returns a collective's device groups, or None if it spans the full axis."""
    return eqn.params.get("axis_index_groups")


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the atoms that are variables rather than literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def read_by(eqns: Iterable[Any]) -> set[Any]:
    """Returns the variables that the equations read."""
    return {v for eqn in eqns for v in variables(eqn.invars)}


def made_by(eqns: Iterable[Any]) -> set[Any]:
    """Returns the variables that the equations define."""
    return {v for eqn in eqns for v in eqn.outvars}


def nested(eqns: Iterable[Any], closed: Collection[str] = ()) -> Iterator[Any]:
    """Yields the equations and all those inside of them, but of ``closed`` ones."""
    for eqn in eqns:
        yield eqn
        if eqn.primitive.name not in closed:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from nested(inner.eqns, closed)


def connections(jaxpr: core.Jaxpr) -> list[Any]:
    """Returns which primitives read what, with no shapes nor values: equal or not."""
    made = [jaxpr.constvars, jaxpr.invars, *(eqn.outvars for eqn in jaxpr.eqns)]
    number = {v: i for i, v in enumerate(itertools.chain.from_iterable(made))}
    read = lambda atoms: [number[v] for v in variables(atoms)]
    found: list[Any] = [read(jaxpr.outvars)]
    for eqn in jaxpr.eqns:
        inner = [connections(x) for x in core.jaxprs_in_params(eqn.params)]
        found.append((eqn.primitive.name, read(eqn.invars), inner))
    return found


def find(eqns: Iterable[Any], names: Collection[str]) -> Any:
    """Returns the first equation of one of these primitives, nested or not, or None."""
    return next((eqn for eqn in nested(eqns) if eqn.primitive.name in names), None)


def has(eqn: Any, names: Collection[str]) -> bool:
    """Returns whether an equation is or contains one of these primitives."""
    return find([eqn], names) is not None


def read(env: dict[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """Returns the values of atoms, looking up variables in ``env``."""
    return [a.val if isinstance(a, core.Literal) else env[a] for a in atoms]


def environment(closed: core.ClosedJaxpr, inputs: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values of a program's inputs and constants, by variable."""
    jaxpr = closed.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    return dict(zip(names, [*closed.consts, *inputs], strict=True))


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Applies an equation's primitive to ``values`` and returns the results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scopes_of(eqn: Any) -> str:
    """Returns the name scopes in which an equation was traced, like "jvp(layers)/x"."""
    return str(eqn.source_info.name_stack)


@contextlib.contextmanager
def context(eqn: Any) -> Iterator[None]:
    """Restores the JAX settings and name scopes in which an equation was traced."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn.ctx.manager)
        if scopes := scopes_of(eqn):
            stack.enter_context(jax.named_scope(scopes))
        yield


def evaluate(
    eqns: Iterable[Any], env: dict[Any, Any], outputs: Sequence[Any] = ()
) -> list:
    """Runs equations, adds their results to ``env`` and returns ``outputs``."""
    for eqn in eqns:
        with context(eqn):
            results = bind(eqn, read(env, eqn.invars))
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(jnp.asarray, read(env, outputs)))


def flat_jaxpr(closed: core.ClosedJaxpr, inputs: Sequence[Any]) -> core.ClosedJaxpr:
    """Returns a program with its calls inlined, traced again for ``inputs``."""

    def run(closed: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        env = environment(closed, inputs)
        for eqn in closed.jaxpr.eqns:
            call, values = eqn.primitive.name in CALLS, read(env, eqn.invars)
            with context(eqn):
                results = run(inner_jaxpr(eqn), values) if call else bind(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return read(env, closed.jaxpr.outvars)

    return jax.make_jaxpr(lambda *inputs: run(closed, inputs))(*inputs)


def inner_jaxpr(call: Any) -> core.ClosedJaxpr:
    """Returns the jaxpr called by an equation whose primitive is in ``CALLS``."""
    inner = call.params[CALLS[call.primitive.name]]
    # Since JAX 0.12 one class is both, and has its constants.
    return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())


def open_inner(eqn: Any) -> core.Jaxpr | None:
    """Returns an equation's inner jaxpr if it takes the same inputs, or None."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    takes_all = isinstance(inner, core.Jaxpr) and len(inner.invars) == len(eqn.invars)
    return inner if takes_all else None


def shard_map_again(eqn: Any, fn: Callable) -> Callable:
    """Returns a ``shard_map`` of ``fn`` with the mesh and specs of an equation.

    ``fn`` takes one more replicated array before the inputs of ``eqn``, and returns a
    list with the outputs of ``eqn``, and one more replicated array.
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
    """Returns the number of constants and the number of carry values of a ``scan``.

    Its inputs are constants, carry and scanned arrays, its outputs carry and stacked
    arrays. Scanned and stacked arrays have one fewer dimension inside the body, so
    their ranks tell; the parameters with these numbers differ between JAX versions.
    """
    body = scan_body(eqn)

    def unsliced(outside: Any, inside: Any) -> bool:
        return outside.aval.ndim == inside.aval.ndim

    num_carry = sum(map(unsliced, eqn.outvars, body.outvars))
    return sum(map(unsliced, eqn.invars, body.invars)) - num_carry, num_carry


def scan_body(eqn: Any) -> core.Jaxpr:
    """Returns the jaxpr of a ``scan``'s body."""
    return getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])


def while_parts(eqn: Any) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr, int, int]:
    """Returns a ``while`` loop's condition and body, and their numbers of constants.

    The inputs are the constants of the condition, those of the body, and the carry.
    """
    names = "cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"
    condition, body, of_condition, of_body = (eqn.params[name] for name in names)
    return condition, body, of_condition, of_body


def is_typed(x: Any) -> bool:
    """Returns whether ``x`` has a type that says over which mesh axes it varies.

    ``shard_map(check_vma=True)``, JAX's default, gives inputs that are split this type.
    """
    kind = jax.typeof(x).manual_axis_type
    return kind is not None and bool(kind.varying)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A value that is not an array, as a pytree without leaves.

    A traced function can return it.
    """

    value: Any


def replay(traced: core.ClosedJaxpr, shapes: Any) -> Callable:
    """Returns a function that evaluates a trace of ``jax.make_jaxpr``.

    ``shapes`` has the structure of its results.
    """
    structure = jax.tree.structure(shapes)

    def call(*args: Any) -> Any:
        leaves = core.jaxpr_as_fun(traced)(*jax.tree.leaves(args))
        return jax.tree.unflatten(structure, map(jnp.asarray, leaves))

    return call


def consts_as_inputs(
    traced: core.ClosedJaxpr, inputs: Sequence[Any], consts: Sequence[Any]
) -> core.Jaxpr:
    """Returns a program whose constants are its last inputs.

    ``inputs`` and ``consts`` are its own, or abstract ones.
    """

    def run(inputs: Sequence[Any], consts: Sequence[Any]) -> list[Any]:
        return core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))(*inputs)

    return jax.make_jaxpr(run)(inputs, consts).jaxpr


def without_dead_code(fn: Callable) -> Callable:
    """Returns ``fn``, a function of flat arrays, with dead code removed.

    Callbacks that return nothing which is needed are dead, too.
    """

    def run(*leaves: Any) -> list[Any]:
        traced = jax.make_jaxpr(fn)(*leaves)
        jaxpr = consts_as_inputs(traced, leaves, traced.consts)
        wanted = [True] * len(jaxpr.outvars)
        needed = needed_for(jaxpr, wanted, effects=False)
        return run_used(*needed, [*leaves, *traced.consts])

    return run


def needed_for(
    jaxpr: core.Jaxpr, outputs: Sequence[bool], *, effects: bool = True
) -> tuple[core.Jaxpr, list[bool]]:
    """Keeps what some outputs need; returns it, and which inputs it still uses.

    What has ``effects`` is needed (``jax.debug.print``, say), unless these are False.
    """
    if not effects:
        eqns = [eqn.replace(effects=frozenset()) for eqn in jaxpr.eqns]
        jaxpr = jaxpr.replace(eqns=eqns)
    if find(jaxpr.eqns, KERNELS) is not None:
        jaxpr, _ = pe.dce_jaxpr(jaxpr, list(outputs), instantiate=True)
        jaxpr, outputs = _without_dead_code(jaxpr), [True] * len(jaxpr.outvars)
    return pe.dce_jaxpr(jaxpr, list(outputs))


def _without_dead_code(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Drops equations that no output depends on, kernels too, but not inside others."""
    needed, eqns = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(variables(eqn.invars))
    return jaxpr.replace(eqns=eqns[::-1])


def without_unused(
    closed: core.ClosedJaxpr, outputs: Sequence[bool] | None = None
) -> core.ClosedJaxpr:
    """Keeps some outputs, by default all, and what they need; keeps all inputs."""
    wanted = list(outputs or [True] * len(closed.jaxpr.outvars))
    inner, used, _ = pe.dce_jaxpr_consts(closed.jaxpr, wanted, instantiate=True)
    return core.ClosedJaxpr(inner, list(itertools.compress(closed.consts, used)))


def run_used(jaxpr: Any, used: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr from ``needed_for``, given all inputs, used or not."""
    needed = itertools.compress(inputs, used)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*needed)
