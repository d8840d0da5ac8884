"""Whether a program's text holds together, as XLA's own does.

What plans a program relies on this; a file may be cut off, edited, or of another
version of XLA.
"""

from collections.abc import Iterator

from jshard.plan.hlo.program_text import Computation, Instruction, Module

MOST_RUNS = 10_000_000  # instructions in one call of a program, loops unrolled
# The least number of operands that what reads them counts on.
_OPERANDS = {
    "dot": 2, "convolution": 2, "dynamic-update-slice": 2, "scatter": 2, "while": 1,
    "copy": 1, "copy-start": 1, "async-start": 1, "get-tuple-element": 1, "bitcast": 1,
    "slice": 1, "dynamic-slice": 1, "gather": 1, "all-gather": 1, "all-reduce": 1,
    "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1,
}  # fmt: skip
_ROLES = {"while": ("body", "condition"), "fusion": ("calls",)}


def problems(module: Module) -> Iterator[str]:
    """Yields in words what does not hold together; the first suffices."""
    for body in module.computations.values():
        yield from _of_computation(module, body)
    yield from _circles(module, module.entry, (), set())


def runs(module: Module, body: Computation) -> int:
    """Returns how many instructions a call of a computation runs."""
    total = len(body.instructions)
    for x in body.instructions:
        if x.opcode == "while":
            total += module.trips(x) * runs(module, module.body(x))
        elif x.opcode in ("call", "conditional"):
            total += sum(runs(module, inside) for inside in module.inside(x))
    return total


def _of_computation(module: Module, body: Computation) -> Iterator[str]:
    seen: dict[str, Instruction] = {}
    for x in body.instructions:
        for name, element in x.reads:
            if name not in seen:
                yield f"{x.name} reads {name}, which is not before it in {body.name}"
                return
            if element is not None and element >= len(seen[name].arrays):
                yield f"{x.name} reads element {element} of {name}, which has fewer"
        if len(x.operands) < _OPERANDS.get(x.opcode.removesuffix("-start"), 0):
            yield f"{x.name} has fewer operands than its {x.opcode} takes"
        if not x.arrays and not x.opcode.startswith(("tuple", "conditional", "call")):
            yield f"{x.name} has a type that is not understood"
        yield from _of_calls(module, x)
        if x.name in seen:
            yield f"{body.name} has {x.name} twice"
        seen[x.name] = x
    if sum(x.is_root for x in body.instructions) != 1:
        yield f"{body.name} has not one result"
    numbers = [x.literal for x in body.instructions if x.opcode == "parameter"]
    if sorted(numbers, key=lambda text: (len(text), text)) != [
        str(number) for number in range(len(numbers))
    ]:
        yield f"{body.name} has parameters {', '.join(numbers)}"


def _of_calls(module: Module, x: Instruction) -> Iterator[str]:
    """Yields what is wrong with what an instruction calls, or reads of tuples."""
    called = [name for names in x.called.values() for name in names if name]
    missing = [name for name in called if name not in module.computations]
    if missing:
        yield f"{x.name} calls {missing[0]}, which is not there"
        return
    for role in _ROLES.get(x.opcode.removesuffix("-start"), ()):
        if role not in x.called:
            yield f"{x.name} has no {role}="
            return
    if x.opcode == "fusion":
        inside = module.body(x, "calls")
        if len(inside.parameters) != len(x.operands):
            yield f"{x.name} gives {len(x.operands)} operands to {inside.name}"
    if x.opcode == "async-start" and not called:
        yield f"{x.name} has no calls="
    done = x.opcode.endswith(("-done", "-update"))
    if done and not x.operands:
        yield f"{x.name} has fewer operands than its {x.opcode} takes"


def _circles(
    module: Module, body: Computation, around: tuple[str, ...], known: set[str]
) -> Iterator[str]:
    if body.name in around:
        yield f"{body.name} calls itself"
        return
    if body.name in known:
        return
    known.add(body.name)
    for x in body.instructions:
        for inside in module.inside(x):
            yield from _circles(module, inside, (*around, body.name), known)
