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
from collections.abc import Callable, Iterable, Mapping, Sequence

from flax import nnx

from jshard.layout.specs import layer_dims
from jshard.plan.hlo import flow
from jshard.plan.hlo.hlo import Instruction, Module, arrays
from jshard.plan.hlo.source import BACKWARD, FORWARD, direction
from jshard.plan.memory.buffers import Assignment, Slot, Value
from jshard.state import TrainState

PARAMETERS, OPTIMIZER, BATCH = "parameters", "optimizer", "batch"
GRADIENTS, GATHERED = "gradients", "gathered weights"
SAVED, WORKSPACE = "saved activations", "workspace"
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
PARAMS, REST = 1, 2  # what a value depends on, as bits


def part_of(name: str) -> str:
    """The part of an argument: "state.params['norm'].value", "batch['targets']"."""
    if name.startswith("batch"):
        return BATCH
    match = re.match(r"state\.(\w+)", name)
    return _PARTS.get(match[1], UNEXPLAINED) if match else UNEXPLAINED


def account(assignment: Assignment, state: TrainState) -> collections.Counter[str]:
    """Bytes on one device by part.

    Args:
      assignment: of a train step.
      state: abstract, with shardings.
    """
    found: collections.Counter[str] = collections.Counter()
    names = {x.number: x.source for x in _parameters(assignment.module)}
    for number, size in assignment.arguments.items():
        found[part_of(names[number])] += size
    part_of_slot = _classifier(assignment, state)
    for slot in assignment.slots:
        found[part_of_slot(slot)] += slot.nbytes
    found[FRAGMENTATION] = assignment.fragmentation
    return found


def _classifier(assignment: Assignment, state: TrainState) -> Callable[[Slot], str]:
    module = assignment.module
    depends = flow.dependencies(
        module,
        {
            x.name: PARAMS if re.match(r"state\.(params|frozen)", x.source) else REST
            for x in _parameters(module)
        },
    )
    summed, readers = flow.summed(module), flow.readers(module)
    shards, stacks = _shapes(state)
    first = _backward_start(assignment.sequence, module, depends)

    def bits(value: Value) -> int:
        found = depends.get(value.name, [])
        return found[min(value.element or 0, len(found) - 1)] if found else 0

    def is_read_later(value: Value) -> bool:
        return any(
            _directions(x.source) == {BACKWARD}
            or x.source.endswith("dynamic_update_slice")
            for x in readers(value.name, value.element)
        )

    def part(slot: Slot) -> str:
        values = [v for v in slot.values if not v.is_tuple]
        if not values:  # tables of addresses
            return WORKSPACE
        if all(bits(v) == PARAMS for v in values):
            return GATHERED
        if any((v.name, v.element or 0) in summed for v in values):
            return GRADIENTS
        made_by = [module.instructions[v.name].source for v in slot.history]
        backward = any(BACKWARD in _directions(name) for name in made_by)
        shapes = {_sizes(arrays(v.shape)[0].shape) for v in values}
        if shapes & shards or (backward and shapes & stacks):
            if any("/shard_map" in name for name in made_by):
                return GRADIENTS
        if slot.start < first < slot.end and any(map(is_read_later, slot.history)):
            return SAVED
        return WORKSPACE if any(made_by) else UNEXPLAINED

    return part


def _parameters(module: Module) -> list[Instruction]:
    return [x for x in module.entry.instructions if x.opcode == "parameter"]


def _directions(source: str) -> set[str]:
    """Of the operations of a (fused) instruction: forward, backward, both or none."""
    return {direction(part) for part in source.split(":")} & {FORWARD, BACKWARD}


def _backward_start(
    sequence: Iterable[str], module: Module, depends: Mapping[str, Sequence[int]]
) -> int:
    """When the first instruction runs that is of the backward, and of activations."""
    for time, name in enumerate(sequence):
        x = module.instructions.get(name)
        if x and x.opcode not in _NO_WORK and _directions(x.source) == {BACKWARD}:
            if any(bit & REST for bit in depends.get(name, ())):
                return time
    raise ValueError("the program has no backward")


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """Those of a shape that are not 1."""
    return tuple(size for size in shape if size > 1)


def _shapes(state: TrainState) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Shapes that gradients have: of shards, and of all layers of a Stack."""
    shards, stacks = set(), set()
    for _, variable in nnx.to_flat_state(state.params):
        x = variable.get_value()
        shard = x.sharding.shard_shape(x.shape)
        if math.prod(shard) >= _LARGE:
            shards.add(_sizes(shard))
        if layer_dims(variable):
            stacks.add(_sizes(x.shape))
    return shards, stacks
