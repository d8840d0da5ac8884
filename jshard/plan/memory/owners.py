"""The memory of any program, by who owns it, as far as its names tell."""

import collections
import re
from collections.abc import Iterable, Iterator

from jshard.plan.fit.hardware import GPU
from jshard.plan.hlo.program_file import is_of_cpus
from jshard.plan.hlo.program_text import (
    BACKWARD,
    FORWARD,
    Instruction,
    Module,
    direction,
)
from jshard.plan.memory.breakdown import Memory, Part
from jshard.plan.memory.live_values import (
    ON_CPUS,
    ON_GPUS,
    Buffer,
    aliases,
    temporary,
)
from jshard.system.formatting import format_bytes

_MOST_OWNERS = 8  # that one argument is split into
_SHOWN = 3
_NUMBERED = re.compile(r"Arg_\d+(\.\d+)?")  # of what JAX has no name for
_PARTS = {FORWARD: "values of the forward", BACKWARD: "values of the backward"}
_OTHERS = "other values"


def memory_by_owner(
    module: Module, text: str, devices: int, gpu: GPU | None, total: int | None
) -> Memory:
    """Returns the memory of a program on a device: arguments, results, values between.

    Values that are alive at the same time are followed through the schedule
    (``live_values``); a ``total`` of XLA's leaves unexplained what these do not reach.

    Args:
      module: of the program.
      text: its text, whose first line says which arguments results take over.
      devices: for how many it was compiled.
      gpu: the card; None for other devices.
      total: bytes of XLA's own account; None if it is not known.
    """
    donated = aliases(text.partition("\n")[0])
    taking_over = ON_CPUS if is_of_cpus(module, text) else ON_GPUS
    parts = [*_arguments(module, donated.values()), *_results(module, donated)]
    parts += _values(temporary(module, donated, taking_over).alive)
    found = sum(part.bytes for part in parts)
    host = sum(
        array.bytes
        for x in module.entry.parameters.values()
        for array in x.arrays
        if array.on_host
    )
    return Memory(
        tuple(parts),
        found if total is None else total,
        0 if total is None else total - found,
        None if gpu is None else gpu.usable,
        (Part("arguments", host, "in host memory"),) if host else (),
        devices if gpu is None else min(gpu.host, devices),
        exact=total is not None,
    )


def owners(module: Module) -> dict[str, list[Instruction]]:
    """Returns a program's arguments by owner: "params", or "state.params"."""
    arguments = [x for _, x in sorted(module.entry.parameters.items())]
    named = ["" if _NUMBERED.fullmatch(x.source) else x.source for x in arguments]
    paths = [tuple(re.findall(r"\w+", name)) for name in named]
    below: dict[str, set[str]] = collections.defaultdict(set)
    for path in paths:
        below[path[0] if path else ""].add(path[1] if len(path) > 1 else "")
    groups: dict[str, list[Instruction]] = collections.defaultdict(list)
    for x, path in zip(arguments, paths, strict=True):
        names = below[path[0]] if path else set()
        split = 1 < len(names) <= _MOST_OWNERS and not any(map(str.isdigit, names))
        groups[".".join(path[: 1 + split]) or "arguments"].append(x)
    return groups


def _arguments(module: Module, donated: Iterable[int]) -> Iterator[Part]:
    groups = owners(module)
    taken = set(donated)
    for name, group in groups.items():
        sizes: collections.Counter[str] = collections.Counter()
        for x in group:
            for array in x.arrays:
                sizes[array.dtype] += 0 if array.on_host else array.bytes
        given_up = sum(x.number in taken for x in group)
        dtypes = ", ".join(dtype for dtype, _ in sizes.most_common(2))
        number = f"{len(group)} argument" + "s" * (len(group) > 1)
        how = f"; {given_up} donated" if given_up else ""
        yield Part(name, sizes.total(), f"{number}, {dtypes}{how}")


def _results(module: Module, donated: Iterable[int]) -> Iterator[Part]:
    taken = set(donated)
    kept = [
        array.bytes
        for number, array in enumerate(module.entry.root.arrays)
        if number not in taken and not array.on_host
    ]
    number = f"{len(kept)} result" + "s" * (len(kept) != 1)
    yield Part("results", sum(kept), f"{number} in memory of their own")


def _values(alive: Iterable[Buffer]) -> Iterator[Part]:
    groups: dict[str, list[Buffer]] = collections.defaultdict(list)
    for buffer in alive:
        if buffer.bytes:
            way = direction(buffer.made_by.source)
            groups[_PARTS.get(way, _OTHERS)].append(buffer)
    for name in (*_PARTS.values(), _OTHERS):
        sizes: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for buffer in groups[name]:
            sizes[_words(buffer)] += buffer.bytes
            counts[_words(buffer)] += 1
        if sizes:
            largest = ", ".join(
                f"{counts[words]} x {words}" if counts[words] > 1 else words
                for words, _ in sizes.most_common(_SHOWN)
            )
            yield Part(name, sizes.total(), f"alive at the peak: {largest}")


def _words(buffer: Buffer) -> str:
    """Returns "bf16[4,128] (12.0 KiB) of mlp/dot_general", for example."""
    x = buffer.made_by
    array = next((a for a in x.arrays if a.bytes == buffer.bytes), None)
    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]" if array else x.opcode
    return f"{shape} ({format_bytes(buffer.bytes)}) of {_origin(x)}"


def _origin(x: Instruction) -> str:
    """Returns the operation that makes a value, or the argument that it is made of."""
    # A kernel of several has them as (a:b), or a/(b/c:d).
    if "/" not in x.source:
        return ".".join(re.findall(r"\w+", x.source.split(":")[0])) or x.name
    # Until JAX 0.4 operations had their arguments, in brackets.
    first = f"/{x.source}".split(":")[0].replace("/(", "/")
    path = re.sub(r"\[.*?\]", "", first)
    return "/".join(path.split("/")[-2:])
