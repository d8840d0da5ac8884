"""What a device holds at the fullest moment of a step, from its jaxpr alone.

Nothing is compiled: the step's equations are walked in the order they are traced, which
is the order of layers that XLA keeps to (``plan.memory.values``: which are in memory).
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from jshard.compat.jaxprs import CALLS, scan_body, scan_sizes
from jshard.plan.memory.values import (
    PARAMETERS,
    REST,
    Step,
    Value,
    mark_gradients,
    place,
)
from jshard.state import TrainState
from jshard.unit.dataflow import equation_dependencies

GRADIENTS, GATHERED = "gradients", "gathered weights"
SAVED, WORKSPACE, HOST = "saved activations", "workspace", "host"
# Bytes by kind; those in host memory come besides.
Held = collections.Counter[str]

_CALLS = {*CALLS, "shard_map"}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The fullest moment of the device.

    Attributes:
      held: bytes by kind, besides the arguments.
      where: the phase that it is in.
      host: bytes in host memory besides the arguments, when there are the most.
    """

    held: Held
    where: str
    host: int = 0


def peak(jaxpr: core.Jaxpr, state: TrainState) -> Peak:
    """The fullest moment of a train step, the state and the batch not counted.

    Args:
      jaxpr: of ``train_step.trace(state, batch)``.
      state: abstract, with shardings.
    """
    leaves = jax.tree.leaves(state)
    params = {id(x) for x in jax.tree.leaves((state.params, state.frozen))}
    local = {}
    for x in leaves:  # and one layer of it
        for shape in (x.shape[1:], (1, *x.shape[1:]), x.shape):
            local[shape] = min(_local(x), local.get(shape, 1))
    walk = _Walk(local)
    inputs = [
        Value(
            0,
            bits=PARAMETERS if i < len(leaves) and id(leaves[i]) in params else REST,
            counted=False,
            stored=True,
        )
        for i in range(len(jaxpr.invars))
    ]
    num_gradients = len(jax.tree.leaves(state.params))
    return walk.level(jaxpr, inputs, num_gradients, top=True)


def _local(x: Any) -> float:
    """A device's part of an array, as a fraction."""
    return math.prod(x.sharding.shard_shape(x.shape)) / max(x.size, 1)


def nbytes(aval: Any) -> int:
    """Bytes of an array, abstract or not; random keys are of 16."""
    itemsize = getattr(aval.dtype, "itemsize", 16)
    return math.prod(aval.shape) * itemsize


class _Walk:
    def __init__(self, local: dict[tuple[int, ...], float]):
        self.local = local
        self.shard_map_outputs: list[Value] | None = None

    def level(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[Value],
        gradients: int | Sequence[bool],
        *,
        top: bool = False,
        local: bool = False,
        within: str = "",
    ) -> Peak:
        """The fullest moment of a jaxpr whose inputs its caller counts.

        Args:
          jaxpr: the step, or what a loop does each time.
          inputs: its inputs.
          gradients: which outputs are gradients; of a step, how many of its
            ``shard_map``'s.
          top: whether it is the whole step.
          local: whether its shapes are those of one device.
          within: the phase of the loop it is in.
        """
        steps: list[Step] = []
        outputs = self._flatten(jaxpr, inputs, steps, phase=within, local=local)
        if isinstance(gradients, int):
            marked = (self.shard_map_outputs or [])[:gradients]
        else:
            marked = [v for v, g in zip(outputs, gradients, strict=True) if g]
        inner_marks = mark_gradients(steps, marked)
        place(steps, outputs, top=top)
        return self._fullest(steps, inner_marks, top=top, within=within)

    def _flatten(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[Value],
        steps: list[Step],
        *,
        phase: str,
        local: bool,
    ) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: Value(nbytes(var.aval)) for var in jaxpr.constvars}

        def read(atom: Any) -> Value:
            return Value(0) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            entering = list(map(read, eqn.invars))
            here = phase or _phase(eqn)
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner = getattr(inner, "jaxpr", inner)
            once = eqn.primitive.name == "scan" and eqn.params["length"] == 1
            if isinstance(inner, core.Jaxpr) and (once or eqn.primitive.name in _CALLS):
                manual = eqn.primitive.name == "shard_map"
                results = self._flatten(
                    inner, entering, steps, phase=here, local=local or manual
                )
                if manual and self.shard_map_outputs is None:
                    self.shard_map_outputs = results  # (an update may have more)
            else:
                bits = [v.bits for v in entering]
                bits = equation_dependencies(eqn, bits, by_value=True)
                results = [
                    self._value(var.aval, bit, here, len(steps), local)
                    for var, bit in zip(eqn.outvars, bits, strict=True)
                ]
                steps.append(Step(eqn, entering, results, here, local))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _value(
        self, aval: Any, bits: int, phase: str, start: int, local: bool
    ) -> Value:
        size = nbytes(aval)
        if not local:
            size = int(size * self.local.get(aval.shape, 1))
        hosted = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        return Value(size, bits, hosted, start, start, phase)

    def _fullest(
        self, steps: list[Step], marks: dict[int, Any], *, top: bool, within: str
    ) -> Peak:
        starts, ends = collections.defaultdict(list), collections.defaultdict(list)
        for step in steps:
            for value in step.outputs:
                if value.stored and value.alias is None and value.counted:
                    starts[value.start].append(value)
                    ends[value.end].append(value)
        held: Held = collections.Counter()
        best, host = Peak(collections.Counter(), ""), 0
        for i, step in enumerate(steps):
            for value in starts[i]:
                held[_kind(value, step, within)] += value.nbytes
            inside = self._inside(step, marks.get(i), within)
            now = held + inside.held
            host = max(host, held[HOST] + inside.host)
            if _total(now) > _total(best.held):
                best = Peak(now, inside.where or step.phase or "update" * top)
            for value in ends[i]:
                made_by = steps[value.start]
                held[_kind(value, made_by, within)] -= value.nbytes
        best.held.pop(HOST, None)
        return dataclasses.replace(best, host=host)

    def _inside(self, step: Step, marks: Any, within: str) -> Peak:
        """What a loop, or the larger branch, needs besides its operands and results."""
        if step.eqn.primitive.name == "cond":
            taken = [
                self.level(
                    branch.jaxpr,
                    [dataclasses.replace(v, counted=False) for v in step.inputs[1:]],
                    [False] * len(step.outputs),
                    local=step.local,
                    within=step.phase or within,
                )
                for branch in step.eqn.params["branches"]
            ]
            return max(taken, key=lambda found: _total(found.held))
        if step.eqn.primitive.name != "scan":
            return Peak(collections.Counter(), "")
        body, (consts, carry) = scan_body(step.eqn), scan_sizes(step.eqn)
        bits = [v.bits for v in step.inputs]
        out = equation_dependencies(step.eqn, bits, by_value=True)
        inputs = []
        for i, var in enumerate(body.invars):
            sliced = i >= consts + carry
            bit = bits[i] | (out[i - consts] if consts <= i < consts + carry else 0)
            inputs.append(
                Value(nbytes(var.aval), bit, stored=not sliced, counted=False)
            )
        where = step.phase or within
        found = self.level(
            body,
            inputs,
            marks or [False] * len(out),
            local=step.local,
            within=where,
        )
        return Peak(found.held, f"{where} loop", found.host)


def _phase(eqn: Any) -> str:
    stack = str(eqn.source_info.name_stack)
    for phase in ("transpose", "jvp"):
        if stack.startswith(phase):
            return phase
    return ""


def _total(held: Held) -> int:
    return sum(size for kind, size in held.items() if kind != HOST)


def _kind(value: Value, made_by: Step, within: str) -> str:
    if value.hosted:
        return HOST
    if value.gradient:
        return GRADIENTS
    if value.bits == PARAMETERS and made_by.local:
        return GATHERED
    saved = value.phase == "jvp" and value.last_phase == "transpose"
    return SAVED if saved and not within else WORKSPACE
