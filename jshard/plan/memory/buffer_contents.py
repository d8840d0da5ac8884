"""XLA's buffers at a step's peak of memory, by what they hold.

Arguments have the names of the state's arrays. A temporary buffer that depends only on
parameters holds gathered weights (or casts of shards). One whose value is summed over
devices unchanged holds gradients, as does one that has the shape of a parameter's shard
or of a complete Stack and is computed in the backward. One that is computed in the
forward and read in the backward holds saved activations. Everything else that an
operation of the step computes is workspace, and the rest is unexplained.
"""

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from flax import nnx

from jshard.plan.hlo import flow
from jshard.plan.hlo.program_text import BACKWARD, FORWARD, Module, arrays, direction
from jshard.plan.memory.buffer_assignment import Assignment, Slot, Value
from jshard.sharding.layout.capacity import shard_size
from jshard.sharding.layout.specs import layer_dims
from jshard.sharding.settings.mesh import stages_of
from jshard.sharding.settings.state import TrainState

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
_LARGE = 1024  # elements; the shapes of smaller arrays prove little
PARAMS, REST = 1, 2  # what a value depends on, as bits
Shape = tuple[int, ...]


def part_of(name: str) -> str:
    """The part of an argument: "state.params['norm'].value", "batch['targets']"."""
    if name.startswith("batch"):
        return BATCH
    match = re.match(r"state\.(\w+)", name)
    return _PARTS.get(match[1], UNEXPLAINED) if match else UNEXPLAINED


def account(assignment: Assignment, state: TrainState) -> collections.Counter[str]:
    """Returns a train step's bytes on one device, by part, from its abstract state."""
    found: collections.Counter[str] = collections.Counter()
    parameters = assignment.module.entry.parameters
    for number, size in assignment.arguments.items():
        found[part_of(parameters[number].source)] += size
    part_of_slot = _classifier(assignment, state)
    for slot in assignment.slots:
        found[part_of_slot(slot)] += slot.nbytes
    found[FRAGMENTATION] = assignment.fragmentation
    return found


def _classifier(assignment: Assignment, state: TrainState) -> Callable[[Slot], str]:
    module = assignment.module
    inputs = {
        x.name: PARAMS if re.match(r"state\.(params|frozen)", x.source) else REST
        for x in module.entry.parameters.values()
    }
    depends = flow.dependencies(module, inputs)
    summed, readers = flow.summed(module), flow.readers(module)
    shards, stacks = _gradient_shapes(state)
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
        values = [v for v in slot.values if not v.shape.startswith("(")]
        if not values:  # tuples are tables of addresses
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


def _directions(source: str) -> set[str]:
    """Forward and backward, as far as a (fused) instruction has operations of them."""
    return {direction(part) for part in source.split(":")} & {FORWARD, BACKWARD}


def _backward_start(
    sequence: Iterable[str], module: Module, depends: Mapping[str, Sequence[int]]
) -> int:
    """When the backward's first instruction on activations runs."""
    for time, name in enumerate(sequence):
        x = module.instructions.get(name)
        if x and x.opcode not in _NO_WORK and _directions(x.source) == {BACKWARD}:
            if any(bit & REST for bit in depends.get(name, ())):
                return time
    raise ValueError("the program has no backward")


def _sizes(shape: Iterable[int]) -> Shape:
    """A shape without dimensions of size 1."""
    return tuple(size for size in shape if size > 1)


def _gradient_shapes(state: TrainState) -> tuple[set[Shape], set[Shape]]:
    """The shapes of shards, and of all layers of a Stack, also those of a stage."""
    shards, stacks = set(), set()
    for _, variable in nnx.to_flat_state(state.params):
        x = variable.get_value()
        shard, stages = x.sharding.shard_shape(x.shape), stages_of(x.sharding.mesh)
        depth = layer_dims(variable)
        rows = [
            -(-size // stages) if i < depth else size for i, size in enumerate(x.shape)
        ]
        # A stage's layers are sharded over its own devices alone.
        of_stage = [
            row if part == size else part * stages
            for row, part, size in zip(rows, shard, x.shape, strict=True)
        ]
        if shard_size(x) >= _LARGE:
            shards |= {_sizes(shard), _sizes(of_stage)}
        if depth:
            stacks |= {_sizes(x.shape), _sizes(rows)}
    return shards, stacks
