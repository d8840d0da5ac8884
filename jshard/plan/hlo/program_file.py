"""Files with a compiled program, as XLA or ``compiled.as_text()`` writes them."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from jshard.plan.hlo.program_text import Computation, Instruction, Module, parse
from jshard.plan.hlo.well_formed import problems
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_text

_HOW = (
    "give what compiled.as_text() returns, or a *_after_optimizations.txt that XLA "
    "writes with XLA_FLAGS=--xla_dump_to=FOLDER"
)
# What only XLA's CPU compiler writes; its matrix products need no kernel around them.
_OF_CPUS = re.compile(r'"outer_dimension_partitions"|__ynn_|__onednn\$|__xla_cpu')
_LARGEST = 2**31  # bytes of a file
_PRODUCTS = ("dot", "convolution")
_TILED = re.compile(r"\{[\d,]*:T\(")  # the layouts of TPUs


def read_program(path: Path) -> str:
    """Reads the text of a scheduled program.

    Raises:
      UserError: It cannot be read, or is no scheduled program of a CPU or GPU.
    """
    try:
        text = read_text(path, _LARGEST)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--from-hlo={path}: cannot be read: {why}") from error
    text = text.lstrip()
    header = text.partition("\n")[0]
    problem = ""
    if not header.startswith("HloModule"):
        problem = "is no program of XLA: it does not begin with HloModule"
        if header.startswith(("module", "#loc")):
            problem = "is StableHLO, from before compiling"
    elif "is_scheduled=true" not in header:
        problem = "is not scheduled, so XLA has not optimized it"
    elif _TILED.search(text):
        problem = "is a program of a TPU, of which nothing is known here"
    if problem:
        raise UserError(f"--from-hlo={path}: {problem}; {_HOW}")
    return text


def parse_program(path: Path, text: str) -> Module:
    """Parses what ``read_program`` returned.

    Raises:
      UserError: It has lines that are not understood.
    """
    for number, line in _not_understood(text):
        raise UserError(
            f"--from-hlo={path}: line {number} is not understood, so the file may be "
            f"of another version of XLA, or cut off: {line.strip()[:80]}"
        )
    why = "is not understood, so the file may be of another version of XLA, or cut off"
    try:
        module = parse(text)
        groups = [x.groups for x in module.instructions.values()]
    except ValueError as error:
        raise UserError(f"--from-hlo={path}: {why}: {error}") from error
    if problem := next(problems(module), ""):
        raise UserError(f"--from-hlo={path}: {why}: {problem}")
    if any(() in found for found in groups):
        raise UserError(f"--from-hlo={path}: {why}: an empty group of devices")
    return module


def _not_understood(text: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of lines within computations that are no instruction."""
    inside, number = False, 0
    instruction = re.compile(r"\s+(ROOT )?%[\w.\-]+ = \S.* ?[a-z][\w\-]*\(")
    for number, line in enumerate(text.splitlines(), 1):
        if not inside:
            inside = line.endswith("{") and " -> " in line
        elif line.startswith("}"):
            inside = False
        elif line.strip() and not instruction.match(line):
            yield number, line
    if inside:
        yield number, "the file ends within a computation"


def number_of_devices(text: str) -> int:
    """Returns for how many devices a program was compiled."""
    header = text.partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(map(int, counts))


def is_of_cpus(module: Module, text: str) -> bool:
    """Whether XLA compiled a program for CPUs."""
    products = any(x.opcode in _PRODUCTS for x in running(module, module.entry))
    return products or _OF_CPUS.search(text) is not None


def running(module: Module, computation: Computation) -> Iterator[Instruction]:
    """Yields what runs by itself, not in a kernel; what is in a loop once."""
    for x in computation.instructions:
        yield x
        if x.opcode in ("while", "conditional", "call"):
            bodies = [module.body(x)] if x.opcode == "while" else module.inside(x)
            for body in bodies:
                yield from running(module, body)


def unknowns(module: Module) -> Iterator[str]:
    """Yields in words what a plan of a program does not know."""
    ran = [*running(module, module.entry)]
    loops = [
        x
        for x in ran
        if x.opcode == "while" and x.trips is None and x.further_rounds is None
    ]
    branches = [x for x in ran if x.opcode == "conditional"]
    calls = [x for x in ran if "callback" in x.target]
    for what, found in (
        ("loops whose length XLA does not know count as one trip", loops),
        ("all branches of a conditional count, of which one runs", branches),
        ("calls into Python count as no time, as theirs is not known", calls),
    ):
        if found:
            source = next((x.source for x in found if x.source), found[0].name)
            yield f"{what}: {len(found)}, the first from {source}"
