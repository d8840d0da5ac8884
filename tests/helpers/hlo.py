"""Reads optimized HLO text: which collectives, products and copies run.

``collectives(compiled.as_text())`` and its like walk the program from its entry.
The body of a while loop counts times the trip count that XLA found, nested loops
multiply, and calls are followed; of a conditional, which runs one branch, every branch
counts.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jshard.plan.cost.transfers import KINDS
from jshard.plan.hlo.program_text import Array, Computation, Instruction, Module, parse
from jshard.sharding.settings.count import DIGITS


def is_number(array: Array) -> bool:
    """Whether it is a scalar, or the digits of a count."""
    return array.size == 1 or (array.dtype == "s32" and array.size == DIGITS)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: one of ``KINDS``; the start of an asynchronous one counts as the whole.
      operands: what a device puts in.
      results: what a device gets.
      group: how many devices take part together.
      times: how often it runs in one call of the program.
      source: the JAX operation it comes from.
    """

    kind: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    group: int
    times: int
    source: str

    @property
    def result_bytes(self) -> int:
        """Bytes that one run leaves on a device."""
        return sum(array.bytes for array in self.results)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in all runs, by a ring."""
        operand_bytes = sum(array.bytes for array in self.operands)
        if self.kind == "collective-permute":
            return self.times * operand_bytes
        whole = {"all-gather": self.result_bytes, "all-reduce": 2 * operand_bytes}
        moved = whole.get(self.kind, operand_bytes)
        return self.times * moved * (self.group - 1) // self.group


@dataclasses.dataclass(frozen=True)
class Dot:
    """One product of arrays.

    Attributes:
      operands: the two factors.
      result: the product.
      contracted: how many terms each of its elements adds up.
      times: how often it runs in one call of the program.
    """

    operands: tuple[Array, ...]
    result: Array
    contracted: int
    times: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of all runs."""
        return self.times * 2 * self.result.size * self.contracted


def compile(lowered: jax.stages.Lowered, **options: Any) -> Any:
    """Compiles to be read, not to run: LLVM does as little as it can.

    Optimization barriers stay until instructions are scheduled. XLA:GPU keeps them so
    long, and XLA:CPU since JAX 0.12. Before, XLA:CPU drops them early, merges what they
    kept apart, and runs what they held back. (Its emitter of small loops cannot pass a
    barrier, so that these stay loops.)
    """
    quick = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    passes = "cse_barrier_expander,small-while-loop-hoisting"
    keep = {"xla_disable_hlo_passes": passes} if jax.__version_info__ < (0, 12) else {}
    # A program from JAX's cache could have the names of scopes of an older source.
    with_names = "jax_compilation_cache_include_metadata_in_key"
    jax.config.update(with_names, True)
    try:
        return lowered.compile(compiler_options=quick | keep | options)
    finally:
        jax.config.update(with_names, False)


def collectives(text: str) -> list[Collective]:
    """The collectives between two devices or more that a program runs.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    found = re.search(r"num_partitions=(\d+)", text)
    devices = int(found[1]) if found else 1
    return [
        _collective(x, devices)
        for x in _runs(text)
        if x.kind in KINDS and _group_size(x, devices) > 1
    ]


def dots(text: str) -> list[Dot]:
    """The products of arrays that a program computes.

    Raises:
      ValueError: a loop that holds one has no known trip count.
    """
    return [_dot(x) for x in _runs(text) if x.opcode == "dot"]


def copies(text: str) -> list[tuple[Array, int]]:
    """What a program copies, and how often.

    Raises:
      ValueError: a loop that holds a copy has no known trip count.
    """
    found = [x for x in _runs(text) if x.kind == "copy"]
    return [(x.instruction.arrays[0], x.times) for x in found]


def calls(text: str) -> Counter[str]:
    """How often a program calls each library, by the target of the call.

    Raises:
      ValueError: a loop that holds a call has no known trip count.
    """
    found: Counter[str] = Counter()
    for x in _runs(text):
        if x.instruction.target:
            found[x.instruction.target] += x.times
    return found


def dtypes_of(text: str, target: str) -> set[str]:
    """The dtypes of both operands of a library's products."""
    return {
        array.dtype
        for x in _runs(text)
        if x.instruction.target == target
        for array in x.computation.given(x.instruction)[:2]
    }


def aliased(text: str) -> set[int]:
    """The numbers of the parameters whose memory an output takes over."""
    header = text[: text.index("\n")]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    entries = re.findall(r"\{[\d, ]*\}: \((\d+), \{\}", found[1] if found else "")
    return set(map(int, entries))


@dataclasses.dataclass(frozen=True)
class _Run:
    """An instruction, where it stands, and how often it runs."""

    instruction: Instruction
    computation: Computation
    trips: int | None

    @property
    def opcode(self) -> str:
        return self.instruction.opcode

    @property
    def kind(self) -> str:
        return self.opcode.removesuffix("-start")

    @property
    def operands(self) -> tuple[Array, ...]:
        names = self.instruction.operands
        return tuple(a for n in names for a in self.computation.by_name[n].arrays)

    @property
    def times(self) -> int:
        if self.trips is None:
            raise ValueError(
                f"{self.opcode} in a loop with no known trip count: "
                f"{self.instruction.name}"
            )
        return self.trips


def _collective(x: _Run, devices: int) -> Collective:
    results = x.instruction.arrays
    if x.opcode != x.kind and len(results) > len(x.operands):
        # An asynchronous start returns (operands, results, context).
        results = results[len(x.operands) : 2 * len(x.operands)]
    group, source = _group_size(x, devices), x.instruction.source
    return Collective(x.kind, x.operands, results, group, x.times, source)


def _dot(x: _Run) -> Dot:
    dims = x.instruction.attribute("lhs_contracting_dims")
    contracted = [x.operands[0].shape[d] for d in dims]
    result = x.instruction.arrays[0]
    return Dot(x.operands, result, math.prod(contracted), x.times)


def _runs(text: str) -> Iterator[_Run]:
    module = parse(text)
    return _walk(module, module.entry, 1)


def _walk(
    module: Module, computation: Computation, times: int | None
) -> Iterator[_Run]:
    for x in computation.instructions:
        yield _Run(x, computation, times)
        for role, names in x.called.items():
            inner_times = times
            if role in ("body", "condition"):
                # A condition runs once more than its body.
                trips = 0 if x.further_rounds else x.trips
                trips = trips and trips + (role == "condition")
                inner_times = times and trips and times * trips
            for name in names:
                yield from _walk(module, module.computations[name], inner_times)


def _group_size(x: _Run, devices: int) -> int:
    attributes = x.instruction.text
    if "source_target_pairs=" in attributes:
        pairs = re.findall(r"\{(\d+),(\d+)\}", attributes)
        return 2 if any(a != b for a, b in pairs) else 1
    return max(map(len, x.instruction.groups), default=devices)
