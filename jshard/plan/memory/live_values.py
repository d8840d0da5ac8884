"""What is alive at the same time in a scheduled program, from its text alone.

XLA's own figures are those of a compiled program; a file with its text has only the
schedule. Values are followed through it as XLA's buffer assignment does: loops carry
theirs in place, updates of slices are in place, and what an elementwise kernel reads
last its result may take over. Gaps in XLA's heap are not modelled.
"""

import collections
import dataclasses
import re
from collections.abc import Container, Iterable
from typing import NamedTuple

from jshard.plan.cost.kernel_work import updates
from jshard.plan.hlo import Computation, Instruction, Module

# Opcodes whose result is their operand.
_SAME = ("bitcast", "opt-barrier", "add-dependency", "domain", "while")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_ALIASED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")
ON_CPUS = ("fusion",)
ON_GPUS = (*ON_CPUS, "all-reduce")  # NCCL's may be in place
_NO_MEMORY = ("constant", "after-all", "partition-id", "replica-id")


@dataclasses.dataclass(eq=False)
class Buffer:
    """An array in a device's memory, and the instruction that writes it."""

    bytes: int
    made_by: Instruction


class Peak(NamedTuple):
    """The most bytes that are alive at a time, and what they are."""

    bytes: int
    alive: tuple[Buffer, ...]


_NOTHING = Peak(0, ())
_Leaves = list[Buffer]  # a value's arrays, tuples flattened


def aliases(header: str) -> dict[int, int]:
    """Returns the arguments that results take over, from a module's first line.

    They are numbers of arguments, by those of results.
    """
    _, _, listed = header.partition("input_output_alias={")
    return {
        int(result.partition(",")[0] or 0): int(argument)
        for result, argument in _ALIASED.findall(listed.partition(" }")[0])
    }


def temporary(
    module: Module, donated: Container[int], taking_over: Container[str] = ON_GPUS
) -> Peak:
    """Returns the peak of what is neither an argument nor a result.

    Args:
      module: the program.
      donated: numbers of the results that take over an argument (``aliases``).
      taking_over: opcodes whose result may take the place of an operand.
    """
    return _follow(module, module.entry, taking_over, donated)


def _outside(x: Instruction) -> _Leaves:
    return [Buffer(0, x) for _ in x.arrays]


def _follow(
    module: Module,
    body: Computation,
    taking_over: Container[str],
    occupied: Container[int] | None = None,
) -> Peak:
    """Returns the peak of a computation, without its parameters and its result.

    Until a result is written, what it is computed from may be in its memory, unless
    that is ``occupied``: by number, or all if it is None.
    """
    values = _Values(module, body)
    before = values.places(body, taking_over)
    for number, buffer in enumerate(values.of[body.root.name]):
        place: Buffer | None = buffer
        while place is not None:  # in memory that the caller has
            place.bytes = 0
            is_free = occupied is not None and number not in occupied
            place = before.get(place) if is_free else None
    ending: dict[int, list[Buffer]] = collections.defaultdict(list)
    for buffer, time in values.last.items():
        ending[time].append(buffer)
    alive: dict[Buffer, None] = {}
    total, most = 0, _NOTHING
    for time, x in enumerate(body.instructions):
        for buffer in values.made[x.name]:
            if (taken := before.get(buffer)) in alive:
                alive.pop(taken)
                total -= taken.bytes
            alive[buffer] = None
            total += buffer.bytes
        inside = _inside(module, x, taking_over)
        if total + inside.bytes > most.bytes:
            most = Peak(total + inside.bytes, (*alive, *inside.alive))
        for buffer in ending[time]:
            if buffer in alive:
                alive.pop(buffer)
                total -= buffer.bytes
    return most


def _inside(module: Module, x: Instruction, taking_over: Container[str]) -> Peak:
    """Returns the peak of what an instruction calls: the largest of branches."""
    if x.opcode not in ("while", "conditional", "call"):
        return _NOTHING
    bodies = [module.body(x)] if x.opcode == "while" else module.inside(x)
    peaks = (_follow(module, body, taking_over) for body in bodies)
    return max(peaks, key=lambda peak: peak.bytes, default=_NOTHING)


class _Values:
    """The buffers of a computation's values, and when each is last read."""

    def __init__(self, module: Module, body: Computation):
        self.module = module
        self.of: dict[str, _Leaves] = {}
        self.made: dict[str, _Leaves] = {}
        self.last: dict[Buffer, int] = {}
        self.reads: dict[str, _Leaves] = {}  # of what is still running
        for time, x in enumerate(body.instructions):
            reads = [self._read(*read) for read in x.reads]
            found = self._result(x, reads)
            known = {buffer for leaves in reads for buffer in leaves}
            self.of[x.name] = found
            self.made[x.name] = [b for b in found if b.made_by is x and b not in known]
            flat = [buffer for leaves in reads for buffer in leaves]
            if x.opcode.endswith(("-start", "-update")):
                self.reads[x.name] = flat
            held = [b for name in x.operands for b in self.reads.get(name, ())]
            # An element of a tuple is no read of the others.
            read = () if x.opcode == "get-tuple-element" else flat
            self.last |= dict.fromkeys((*read, *held, *found), time)
        end = len(body.instructions)
        self.last |= dict.fromkeys(self.of[body.root.name], end)

    def _read(self, name: str, element: int | None) -> _Leaves:
        leaves = self.of[name]
        return leaves if element is None else leaves[element : element + 1]

    def _result(self, x: Instruction, reads: list[_Leaves]) -> _Leaves:
        """Returns the buffers of a result: those of operands, or new ones."""
        flat = [buffer for leaves in reads for buffer in leaves]
        if x.opcode == "parameter":
            return _outside(x)
        if x.opcode == "tuple":
            return flat
        if x.opcode == "get-tuple-element":
            return flat[x.number : x.number + 1]
        if x.opcode in _SAME:
            return flat[: len(x.arrays)]
        if x.opcode.endswith("-update"):
            return flat
        new = [Buffer(0 if a.on_host else a.bytes, x) for a in x.arrays]
        if x.opcode in _NO_MEMORY:
            return _outside(x)
        if x.opcode == "copy-start":  # (destination, source, context)
            return [new[0], *flat, *new[2:]]
        if x.opcode.endswith("-start") and len(new) > len(flat):
            return [*flat, *new[len(flat) :]]
        if x.opcode.endswith("-done"):
            mine = [b for b in flat if b.made_by.name == x.operands[0]]
            return mine[: len(x.arrays)]
        if x.opcode in _IN_PLACE:
            return [flat[0]]
        for result, operand in self._in_place(x):
            if result < len(new) and operand < len(reads) and reads[operand]:
                new[result] = reads[operand][0]
        return new

    def _in_place(self, x: Instruction) -> Iterable[tuple[int, int]]:
        """Yields (result, operand) of what a kernel updates in place."""
        _, _, listed = x.text.partition("output_to_operand_aliasing={")
        for result, operand in _ALIASED.findall(listed.partition("}, ")[0]):
            yield int(result or 0), int(operand)
        if x.opcode == "fusion":
            inside = self.module.body(x, "calls")
            targets = {name for name, _ in updates(inside)}
            free = list(range(len(x.arrays)))
            for number, parameter in inside.parameters.items():
                if parameter.name in targets:
                    size = parameter.bytes
                    for result in free:
                        if x.arrays[result].bytes == size:
                            free.remove(result)
                            yield result, number
                            break

    def places(
        self, body: Computation, taking_over: Container[str]
    ) -> dict[Buffer, Buffer]:
        """Returns the operands, read there last, whose place results take over.

        A transposed operand's place is not free until all of it has been read.
        """
        found: dict[Buffer, Buffer] = {}
        for time, x in enumerate(body.instructions):
            if x.opcode not in taking_over or "kind=kCustom" in x.text:
                continue
            ended = [
                (b, number)
                for number, name in enumerate(x.operands)
                for b in self.of[name]
                if self.last[b] == time
            ]
            for new in self.made[x.name]:
                result = self.of[x.name].index(new)
                for pair in ended:
                    same, number = pair
                    if same.bytes == new.bytes > 0 and self._keeps(x, number, result):
                        ended.remove(pair)
                        found[new] = same
                        break
        return found

    def _keeps(self, x: Instruction, number: int, result: int) -> bool:
        """Whether a kernel's result has the order of an operand."""
        if x.opcode != "fusion":
            return True
        kernel = self.module.body(x, "calls")
        reached = {kernel.parameters[number].name}
        for y in kernel.instructions:
            if y.opcode != "transpose" and not reached.isdisjoint(y.operands):
                reached.add(y.name)
        root = kernel.root
        results = root.operands if root.opcode == "tuple" else (root.name,)
        return results[result] in reached
