"""Streams arrays that wait in host memory through an update, a layer at a time.

The update is any function of (L, ...) arrays, an optimizer's for one. It is traced
twice: as it is, and with every Stack cut to one layer. Where the two programs agree
but for that dimension, an equation treats layers independently, and its second form is
what to do for one layer. What depends on arrays in host memory must be of that kind; it
becomes the body of a loop over layers, with what it alone reads (clipped gradients)
drawn into it. All else (global norms, schedules) runs before the loop, as written.

The loop moves data in both directions at once and holds two layers: while the results
of layer l - 1 leave, those of layer l arrive. An array outside Stacks is a layer of its
own; they take turns, so that two are on the device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jshard.compat.jaxprs import evaluate, flat_jaxpr, made_by, read_by, variables
from jshard.errors import UserError
from jshard.layout.memory_kinds import on_host
from jshard.optim.host_stream import (
    layer_at,
    stream_layers,
    to_device,
    to_host,
    with_layer,
)
from jshard.optim.independent_layers import is_independent


@dataclasses.dataclass(frozen=True)
class _Group:
    """What is updated together: the layers of equal Stacks, or one parameter.

    Attributes:
      length: of the Stacks; 0 for a parameter outside them.
      equations: indices of its equations, in order.
    """

    length: int
    equations: list[int]


def streamed_update(
    update: Callable[[Any, Any], Any],
    state: Any,
    given: Any,
    cut: tuple[Any, Any],
    owners: Sequence[Any],
) -> Any:
    """``update(state, given)``, with the state's host arrays streamed through it.

    For use where arrays are global, under ``jit``.

    Args:
      update: returns a tree like ``state``, of the same shapes and dtypes.
      state: a pytree of arrays, some in host memory; where these are, results stay.
      given: what else the update reads, on the device.
      cut: abstract (state, given) with each Stack's arrays cut to one layer.
      owners: for each array of ``state`` the name of its parameter, if it has one.

    Raises:
      UserError: the update does not treat the layers of host arrays independently.
    """
    values, tree = jax.tree.flatten((state, given))
    number = len(jax.tree.leaves(state))

    def flat(tree: Any) -> Callable:
        def run(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves)))

        return run

    cut_values, cut_tree = jax.tree.flatten(cut)
    program = _Program(
        flat_jaxpr(flat(tree), list(map(_abstract, values))),
        flat_jaxpr(flat(cut_tree), cut_values),
        [on_host(x) for x in values[:number]],
        owners,
    )
    results = program.run(values)
    return jax.tree.unflatten(jax.tree.structure(state), results)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


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
        self.state = full.jaxpr.invars[: len(hosted)]
        self.hosted = {v for v, h in zip(self.state, hosted, strict=True) if h}
        self.cut = _pairs(full.jaxpr, cut.jaxpr)  # full variable -> cut variable
        self.results = full.jaxpr.outvars
        self.groups = self._grouped(dict(zip(self.state, owners, strict=True)))

    def length(self, atom: Any) -> int:
        """The layers of a variable, 0 if it is the same for all, -1 if neither."""
        if isinstance(atom, core.Literal):
            return 0
        shape, cut = atom.aval.shape, self.cut[atom].aval.shape
        if shape == cut:
            return 0
        return shape[0] if cut == (1, *shape[1:]) else -1

    def _is_independent(self, index: int) -> bool:
        return is_independent(self.eqns[index], self.cut_eqns[index], self.length)

    def _grouped(self, owners: dict[Any, Any]) -> list[_Group]:
        """Groups of the equations that depend on host arrays, Stacks first."""
        found: dict[Any, Any] = {  # what a variable is updated with
            v: self.length(v) or owners[v] for v in self.hosted
        }
        members: dict[Any, list[int]] = {}
        for index, eqn in enumerate(self.eqns):
            names = {found[v] for v in variables(eqn.invars) if v in found}
            if not names:
                continue
            (name, *others) = sorted(names, key=str)
            length = name if isinstance(name, int) else 0
            if others or (length and not self._is_independent(index)):
                raise UserError(
                    f"policy.offload: the optimizer's {eqn.primitive.name!r} on "
                    f"{', '.join(map(_described, [name, *others]))} does not treat "
                    "layers independently, so its state cannot be updated a layer at a "
                    "time; wrap what looks at whole tensors in jshard.per_layer, put "
                    "global clipping first in the chain, or use offload=None"
                )
            found |= dict.fromkeys(eqn.outvars, name)
            members.setdefault(name, []).append(index)
        self.later = set(found) - self.hosted
        groups = [
            _Group(length, self._with_sources(eqns, length))
            for name, eqns in members.items()
            for length in [name if isinstance(name, int) else 0]
        ]
        return sorted(groups, key=lambda group: not group.length)

    def _with_sources(self, own: list[int], length: int) -> list[int]:
        """``own``, and equations before them that can run with them, too."""
        needed, chosen = read_by(self.eqns[i] for i in own), set(own)
        for index in reversed(range(own[-1])):
            eqn = self.eqns[index]
            outputs = set(eqn.outvars)
            if needed.isdisjoint(outputs) or not self.later.isdisjoint(outputs):
                continue
            if length:
                layered = all(self.length(v) == length for v in eqn.outvars)
                joins = layered and self._is_independent(index)
            else:  # what is read here alone; scalars are made in time
                outside = (e for i, e in enumerate(self.eqns) if i not in chosen)
                elsewhere = {*read_by(outside), *variables(self.results)}
                alone = outputs.isdisjoint(elsewhere)
                joins = alone and all(v.aval.shape for v in eqn.outvars)
            if joins:
                chosen.add(index)
                needed.update(variables(eqn.invars))
        return sorted(chosen)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The results for these inputs."""
        env = dict(zip(self.jaxpr.invars, values, strict=True))
        env |= zip(self.jaxpr.constvars, self.consts, strict=True)
        evaluate(self._first(), env, ())
        results: dict[Any, Any] = {}  # by the state's variable
        for source, atom in zip(self.state, self.results, strict=True):
            if isinstance(atom, core.Literal) or atom not in self.later:
                (x,) = evaluate((), env, [atom])
                results[source] = to_host(x) if source in self.hosted else to_device(x)
        left: list[list[Any]] = [[], []]  # what each group sent to the host
        for group in self.groups:
            run = self._run_stacks if group.length else self._run_leaf
            made = run(group, env, left[-2])
            left.append([x for source, x in made.items() if source in self.hosted])
            results |= made
        return [results[source] for source in self.state]

    def _first(self) -> list[Any]:
        """The equations that run before all groups, of those that are needed."""
        needed = set(variables(self.results)) - self.later
        for group in self.groups:
            eqns = [self.eqns[i] for i in group.equations]
            needed |= read_by(eqns) - made_by(eqns)
        chosen = []
        for eqn in reversed(self.eqns):
            unneeded = needed.isdisjoint(eqn.outvars)
            if not unneeded and self.later.isdisjoint(eqn.outvars):
                chosen.append(eqn)
                needed.update(variables(eqn.invars))
        return chosen[::-1]

    def _interface(self, group: _Group) -> tuple[list[Any], dict[Any, Any]]:
        """What a group reads, and the results it makes by the state's variable."""
        eqns = [self.eqns[i] for i in group.equations]
        made = made_by(eqns)
        outer = read_by(eqns) - made
        reads = [v for v in self.cut if v in outer]
        makes = {
            source: v
            for source, v in zip(self.state, self.results, strict=True)
            if not isinstance(v, core.Literal) and v in made & self.later
        }
        return reads, makes

    def _run_leaf(
        self, group: _Group, env: dict[Any, Any], before: list[Any]
    ) -> dict[Any, Any]:
        """Updates one parameter after ``before``, the one before the last, left."""
        reads, makes = self._interface(group)
        hosted = [v for v in reads if v in self.hosted]
        others = [v for v in reads if v not in self.hosted]
        arrays, rest, _ = lax.optimization_barrier(
            ([env[v] for v in hosted], [env[v] for v in others], before)
        )
        inner = dict(zip(others, rest, strict=True))
        inner |= zip(hosted, map(to_device, arrays), strict=True)
        outputs = list(makes.values())
        eqns = [self.eqns[i] for i in group.equations]
        return {
            source: to_host(x) if source in self.hosted else x
            for source, x in zip(makes, evaluate(eqns, inner, outputs), strict=True)
        }

    def _run_stacks(
        self, group: _Group, env: dict[Any, Any], before: list[Any]
    ) -> dict[Any, Any]:
        """Updates Stacks, layer by layer."""
        reads, makes = self._interface(group)
        eqns = [self.cut_eqns[i] for i in group.equations]
        outputs = [self.cut[v] for v in makes.values()]
        hosts = [v for v in self.state if v in self.hosted and v in {*reads, *makes}]
        written = [v for v in makes if v not in self.hosted]
        sliced = [v for v in reads if self.length(v) and v not in self.hosted]
        # Nothing is fetched before the gradients are there.
        arrays, arriving, _ = lax.optimization_barrier(
            ([env[v] for v in sliced], [env[v] for v in hosts], before)
        )
        env = env | dict(zip(sliced, arrays, strict=True))
        constants = {self.cut[v]: env[v] for v in reads if not self.length(v)}

        def one_layer(index: Any, fetched: list, stacks: list) -> tuple[list, list]:
            now = env | dict(zip(written, stacks, strict=True))
            inner = constants | {self.cut[v]: layer_at(now[v], index) for v in sliced}
            inner |= {self.cut[v]: x for v, x in zip(hosts, fetched, strict=True)}
            results = dict(zip(makes, evaluate(eqns, inner, outputs), strict=True))
            leaving = [results.get(v) for v in hosts]
            return leaving, [with_layer(now[v], results[v], index) for v in written]

        arrays, stacks = stream_layers(
            one_layer,
            group.length,
            arriving,
            [v in reads for v in hosts],
            [v in makes for v in hosts],
            [env[v] for v in written],
        )
        after = dict(zip([*hosts, *written], [*arrays, *stacks], strict=True))
        return {source: after[source] for source in makes}


def _pairs(full: core.Jaxpr, cut: core.Jaxpr) -> dict[Any, Any]:
    """The variable of ``cut`` for each of ``full``, which must be alike."""
    names = [[eqn.primitive.name for eqn in j.eqns] for j in (full, cut)]
    if names[0] != names[1] or len(full.constvars) != len(cut.constvars):
        different = [a for a, b in zip(*names, strict=False) if a != b]
        raise UserError(
            "policy.offload: the optimizer does something else for a Stack of one layer"
            f" ({(different or ['its end'])[0]!r} differs), so its state cannot be "
            "updated a layer at a time; use offload=None"
        )
    pairs = dict(zip(full.constvars, cut.constvars, strict=True))
    pairs |= zip(full.invars, cut.invars, strict=True)
    for ours, theirs in zip(full.eqns, cut.eqns, strict=True):
        pairs |= zip(ours.outvars, theirs.outvars, strict=True)
    return pairs


def _described(name: Any) -> str:
    return f"a Stack of {name} layers" if isinstance(name, int) else name
