"""XLA's buffers at a step's fullest moment, told apart by how they are made.

Arguments have the names of the state's arrays. A temporary buffer that depends on
parameters alone holds gathered weights (or casts of shards on their way); one whose
value is summed over devices as it is, or that has the shape of a parameter's shard or
of a whole Stack and is made in the backward, holds gradients; one that is made in the
forward and read in the backward holds saved activations; all else that an operation of
the step makes is workspace. What no operation of the step explains stays unexplained.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable

from flax import nnx

from jshard.layout.specs import layer_dims
from jshard.plan.hlo import flow
from jshard.plan.memory.buffers import Assignment, Slot, Value
from jshard.plan.memory.liveness import GATHERED, GRADIENTS, SAVED, WORKSPACE
from jshard.state import TrainState

PARAMETERS, OPTIMIZER, BATCH = "parameters", "optimizer", "batch"
UNEXPLAINED, FRAGMENTATION = "unexplained", "fragmentation"
_PARTS = {
    "params": PARAMETERS,
    "frozen": PARAMETERS,
    "model_state": PARAMETERS,
    "opt_state": OPTIMIZER,
    "ema": OPTIMIZER,
    "loss_scale": OPTIMIZER,
    "step": OPTIMIZER,
}
_NO_WORK = ("tuple", "get-tuple-element", "parameter", "bitcast", "constant")
_LARGE = 1024  # elements; the shapes of smaller arrays say little
_PARAMETERS, _REST = 1, 2  # what a value depends on, as bits


def part_of(name: str) -> str:
    """The part of an argument: "state.params['norm'].value", "batch['targets']"."""
    if name.startswith("batch"):
        return BATCH
    match = re.match(r"state\.(\w+)", name)
    return _PARTS.get(match[1], UNEXPLAINED) if match else UNEXPLAINED


def account(assignment: Assignment, state: TrainState) -> collections.Counter[str]:
    """Bytes on one device by part, by XLA's account.

    Args:
      assignment: of a train step.
      state: abstract, with shardings.
    """
    program = flow.parse(assignment.hlo)
    found: collections.Counter[str] = collections.Counter()
    names = {
        inst.number: inst.source
        for inst in program.module.entry.instructions
        if inst.opcode == "parameter"
    }
    for number, size in assignment.arguments.items():
        found[part_of(names[number])] += size
    kind_of = _classifier(program, assignment, state)
    for slot in assignment.slots:
        found[kind_of(slot)] += slot.nbytes
    found[FRAGMENTATION] = assignment.fragmentation
    return found


def _classifier(
    program: flow.Program, assignment: Assignment, state: TrainState
) -> Callable[[Slot], str]:
    bits = flow.dependencies(program, _inputs(program))
    summed = flow.summed(program)
    shards, stacks = _shapes(state)
    first = _backward_start(program, assignment.sequence, bits)

    def depends(value: Value) -> int:
        found = bits.get(value.name, [])
        element = value.index[0] if value.index else 0
        return found[min(element, len(found) - 1)] if found else 0

    def is_summed(value: Value) -> bool:
        return (value.name, value.index[0] if value.index else 0) in summed

    def is_read_later(value: Value) -> bool:
        element = value.index[0] if value.index else None
        return any(
            _phases(inst.source) == {"backward"}
            or inst.source.endswith("dynamic_update_slice")
            for inst in program.readers(value.name, element)
        )

    def kind(slot: Slot) -> str:
        arrays = [v for v in slot.values if not v.is_tuple]
        if not arrays:  # tables of addresses
            return WORKSPACE
        made_by = [program.instructions[v.name].source for v in slot.history]
        if all(depends(v) == _PARAMETERS for v in arrays):
            return GATHERED
        in_step = any("/shard_map" in name for name in made_by)
        if any(map(is_summed, arrays)):
            return GRADIENTS
        shapes = {_shape(v.shape) for v in arrays}
        backward = any("backward" in _phases(name) for name in made_by)
        if in_step and (shapes & shards or (backward and shapes & stacks)):
            return GRADIENTS
        if slot.start < first < slot.end and any(map(is_read_later, slot.history)):
            return SAVED
        return WORKSPACE if any(made_by) else UNEXPLAINED

    return kind


def _inputs(program: flow.Program) -> dict[str, int]:
    return {
        inst.name: _PARAMETERS
        if re.match(r"state\.(params|frozen)", inst.source)
        else _REST
        for inst in program.module.entry.instructions
        if inst.opcode == "parameter"
    }


def _phases(op_name: str) -> set[str]:
    """Of the operations of a (fused) instruction: "forward", "backward", or neither."""
    found = (re.search(r"jvp\(|transpose\(", part) for part in op_name.split(":"))
    names = {"jvp(": "forward", "transpose(": "backward"}
    return {names[match[0]] for match in found if match}


def _backward_start(
    program: flow.Program,
    sequence: Iterable[str],
    bits: dict[str, list[int]],
) -> int:
    """When the first instruction runs that is of the backward, and of activations."""
    for time, name in enumerate(sequence):
        inst = program.instructions.get(name)
        if inst and _phases(inst.source) == {"backward"}:
            if inst.opcode not in _NO_WORK and any(
                b & _REST for b in bits.get(name, ())
            ):
                return time
    raise ValueError("the program has no backward")


def _shape(text: str) -> tuple[int, ...]:
    """The sizes of "bf16[32,1,4096]{2,1,0}", ones left out."""
    inside = text[text.find("[") + 1 : text.find("]")]
    return tuple(int(size) for size in inside.split(",") if size not in ("", "1"))


def _shapes(state: TrainState) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Shapes that gradients have: of shards, and of all layers of a Stack."""
    shards, stacks = set(), set()
    for _, variable in nnx.to_flat_state(state.params):
        x = variable.get_value()
        shard = x.sharding.shard_shape(x.shape)
        if math.prod(shard) >= _LARGE:
            shards.add(tuple(size for size in shard if size > 1))
        if layer_dims(variable):
            stacks.add(tuple(size for size in x.shape if size > 1))
    return shards, stacks
