"""Streams arrays in host memory through an update, a layer at a time.

The update is any function of (L, ...) arrays, such as an optimizer's. It is traced
twice: unchanged, and with every Stack cut to one layer. Where the two programs agree in
all but that dimension, an equation treats layers independently, and its second form
computes one layer. Everything that depends on arrays in host memory must be of that
kind; it becomes the body of a loop over layers, together with what only the loop reads
(clipped gradients). All else (global norms, schedules) runs before the loop.

The loop moves data in both directions at once and holds two layers: while the results
of layer l - 1 leave, those of layer l arrive. An array outside Stacks is treated as one
layer; such arrays are updated one after another, with two on the device at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from jshard.compat.jaxprs import evaluate, flat_jaxpr, made_by, read_by, variables
from jshard.errors import UserError
from jshard.layout.memory_kinds import on_device, on_host
from jshard.optim.host_stream import layer_at, stream_layers, to_host, with_layer
from jshard.optim.independent_layers import is_independent


def streamed_update(
    update: Callable[[Any, Any], Any],
    state: Any,
    given: Any,
    cut: tuple[Any, Any],
    owners: Sequence[Any],
) -> Any:
    """Computes ``update(state, given)``, streaming the state's host arrays through it.

    For global arrays, under ``jit``.

    Args:
      update: returns a tree like ``state``, of the same shapes and dtypes.
      state: a pytree of arrays, some in host memory; results stay where these are.
      given: the update's other inputs, on the device.
      cut: abstract (state, given) with each Stack's arrays cut to one layer.
      owners: for each array of ``state`` the name of its parameter, if it has one.

    Raises:
      UserError: the update does not treat the layers of host arrays independently.
    """

    def traced(args: tuple[Any, Any]) -> core.ClosedJaxpr:
        leaves, tree = jax.tree.flatten(args)

        def run(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))

        return flat_jaxpr(run, leaves)

    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    full = traced(jax.tree.map(abstract, (state, given)))
    leaves, tree = jax.tree.flatten(state)
    program = _Program(full, traced(cut), list(map(on_host, leaves)), owners)
    return jax.tree.unflatten(tree, program.run([*leaves, *jax.tree.leaves(given)]))


class _Group(NamedTuple):
    """What is updated together: the layers of equal Stacks, or one parameter."""

    length: int  # of the Stacks; 0 for a parameter outside them
    equations: list[Any]  # of one layer, or of the parameter
    reads: list[Any]
    makes: dict[Any, Any]  # results by the variable of the state that each replaces


class _Program:
    """An update's equations, with their forms for one layer, sorted into groups."""

    def __init__(
        self,
        full: core.ClosedJaxpr,
        cut: core.ClosedJaxpr,
        hosted: Sequence[bool],
        owners: Sequence[Any],
    ):
        self.jaxpr, self.consts = full.jaxpr, full.consts
        self.eqns, self.cut_eqns = full.jaxpr.eqns, cut.jaxpr.eqns
        self.results = full.jaxpr.outvars
        self.state = full.jaxpr.invars[: len(hosted)]
        self.hosted = {v for v, h in zip(self.state, hosted, strict=True) if h}
        self.cut = _pairs(full.jaxpr, cut.jaxpr)  # full variable -> cut variable
        members = self._members(dict(zip(self.state, owners, strict=True)))
        # What depends on host arrays is computed in groups, after all else.
        self.later = made_by(self.eqns[i] for own in members.values() for i in own)
        groups = [self._group(name, own) for name, own in members.items()]
        self.groups = sorted(groups, key=lambda group: not group.length)

    def length(self, atom: Any) -> int:
        """Returns a variable's number of layers; -1 if they are not dimension 0."""
        if isinstance(atom, core.Literal):
            return 0
        shape, cut = atom.aval.shape, self.cut[atom].aval.shape
        if shape == cut:
            return 0
        return shape[0] if cut == (1, *shape[1:]) else -1

    def _is_independent(self, index: int) -> bool:
        return is_independent(self.eqns[index], self.cut_eqns[index], self.length)

    def _members(self, owners: dict[Any, Any]) -> dict[Any, list[int]]:
        """Finds what depends on host arrays, by length of Stacks or parameter name."""
        found = {v: self.length(v) or owners[v] for v in self.hosted}
        members: dict[Any, list[int]] = {}
        for index, eqn in enumerate(self.eqns):
            names = {found[v] for v in variables(eqn.invars) if v in found}
            if not names:
                continue
            name, *others = sorted(names, key=str)
            if others or (isinstance(name, int) and not self._is_independent(index)):
                named = [
                    f"a Stack of {n} layers" if isinstance(n, int) else n
                    for n in (name, *others)
                ]
                raise UserError(
                    f"policy.offload: the optimizer's {eqn.primitive.name!r} on "
                    f"{', '.join(named)} does not treat layers independently, so its "
                    "state cannot be updated a layer at a time; wrap what looks at "
                    "entire tensors in jshard.optim.per_layer, put global clipping "
                    "first in the chain, or use offload=None"
                )
            found |= dict.fromkeys(eqn.outvars, name)
            members.setdefault(name, []).append(index)
        return members

    def _group(self, name: Any, own: list[int]) -> _Group:
        length = name if isinstance(name, int) else 0
        indices = self._with_sources(own, length)
        eqns = [self.eqns[i] for i in indices]
        made = made_by(eqns)
        outer = read_by(eqns) - made
        makes = {
            source: result
            for source, result in zip(self.state, self.results, strict=True)
            if not self.later.intersection(made).isdisjoint(variables([result]))
        }
        eqns = [self.cut_eqns[i] for i in indices] if length else eqns
        return _Group(length, eqns, [v for v in self.cut if v in outer], makes)

    def _with_sources(self, own: list[int], length: int) -> list[int]:
        """Adds the equations before ``own`` that can run with them."""
        needed, chosen = read_by(self.eqns[i] for i in own), set(own)
        for index in reversed(range(own[-1])):
            eqn = self.eqns[index]
            outputs = set(eqn.outvars)
            if needed.isdisjoint(outputs) or not self.later.isdisjoint(outputs):
                continue
            if length:
                layered = all(self.length(v) == length for v in outputs)
                joins = layered and self._is_independent(index)
            else:  # what nothing else reads; scalars are computed before the groups
                others = (e for i, e in enumerate(self.eqns) if i not in chosen)
                elsewhere = {*read_by(others), *variables(self.results)}
                alone = outputs.isdisjoint(elsewhere)
                joins = alone and all(v.aval.shape for v in outputs)
            if joins:
                chosen.add(index)
                needed.update(variables(eqn.invars))
        return sorted(chosen)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Returns the results for these inputs."""
        env = dict(zip(self.jaxpr.invars, values, strict=True))
        env |= zip(self.jaxpr.constvars, self.consts, strict=True)
        # Those that are only read in groups are dead code here, which jit removes.
        evaluate([e for e in self.eqns if self.later.isdisjoint(e.outvars)], env)
        results: dict[Any, Any] = {}  # by the state's variable
        for source, result in zip(self.state, self.results, strict=True):
            if self.later.isdisjoint(variables([result])):
                (x,) = evaluate((), env, [result])
                results[source] = self._placed(source, x)
        sent: list[list[Any]] = [[], []]  # what each group sent to the host
        for group in self.groups:
            run = self._run_stacks if group.length else self._run_leaf
            made = run(group, env, sent[-2])
            sent.append([x for source, x in made.items() if source in self.hosted])
            results |= made
        return [results[source] for source in self.state]

    def _placed(self, source: Any, x: Any) -> Any:
        """Puts the next value of a variable of the state where the state has it."""
        return to_host(x) if source in self.hosted else on_device(x)

    def _run_leaf(
        self, group: _Group, env: dict[Any, Any], before: list[Any]
    ) -> dict[Any, Any]:
        """Updates one parameter, after ``before`` has been sent to the host."""
        hosted = [v for v in group.reads if v in self.hosted]
        others = [v for v in group.reads if v not in self.hosted]
        arrays, rest, _ = lax.optimization_barrier(
            ([env[v] for v in hosted], [env[v] for v in others], before)
        )
        inner = dict(zip(others, rest, strict=True))
        inner |= zip(hosted, map(on_device, arrays), strict=True)
        results = evaluate(group.equations, inner, list(group.makes.values()))
        return {
            source: self._placed(source, x)
            for source, x in zip(group.makes, results, strict=True)
        }

    def _run_stacks(
        self, group: _Group, env: dict[Any, Any], before: list[Any]
    ) -> dict[Any, Any]:
        """Updates Stacks layer by layer, after ``before`` has been sent."""
        reads, makes = group.reads, group.makes
        outputs = [self.cut[v] for v in makes.values()]
        hosts = [v for v in self.state if v in self.hosted and v in {*reads, *makes}]
        written = [v for v in makes if v not in self.hosted]
        sliced = [v for v in reads if self.length(v) and v not in self.hosted]
        # Nothing is fetched before the gradients exist.
        arrays, arriving, _ = lax.optimization_barrier(
            ([env[v] for v in sliced], [env[v] for v in hosts], before)
        )
        env = env | dict(zip(sliced, arrays, strict=True))
        constants = {self.cut[v]: env[v] for v in reads if not self.length(v)}

        def one_layer(index: Any, fetched: list, stacks: list) -> tuple[list, list]:
            now = env | dict(zip(written, stacks, strict=True))
            inner = constants | {self.cut[v]: layer_at(now[v], index) for v in sliced}
            inner |= {self.cut[v]: x for v, x in zip(hosts, fetched, strict=True)}
            made = evaluate(group.equations, inner, outputs)
            results = dict(zip(makes, made, strict=True))
            leaving = [results.get(v) for v in hosts]
            return leaving, [with_layer(now[v], results[v], index) for v in written]

        arrays, stacks = stream_layers(
            one_layer,
            group.length,
            arriving,
            [v in reads for v in hosts],
            [env[v] for v in written],
        )
        after = dict(zip([*hosts, *written], [*arrays, *stacks], strict=True))
        return {source: after[source] for source in makes}


def _pairs(full: core.Jaxpr, cut: core.Jaxpr) -> dict[Any, Any]:
    """Maps the variables of ``full`` to those of ``cut``, a program like it."""
    names = [[eqn.primitive.name for eqn in j.eqns] for j in (full, cut)]
    if names[0] != names[1] or len(full.constvars) != len(cut.constvars):
        different = [a for a, b in zip(*names, strict=False) if a != b] or ["its end"]
        raise UserError(
            "policy.offload: the optimizer does something else for a Stack of one layer"
            f" ({different[0]!r} differs), so its state cannot be updated a layer at a "
            "time; use offload=None"
        )
    pairs = dict(zip(full.constvars, cut.constvars, strict=True))
    pairs |= zip(full.invars, cut.invars, strict=True)
    for ours, theirs in zip(full.eqns, cut.eqns, strict=True):
        pairs |= zip(ours.outvars, theirs.outvars, strict=True)
    return pairs
