"""A plan: the memory, traffic and time of a step, from its compiled program alone."""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jshard.mesh import platform
from jshard.plan.cost.timeline import Timeline, replay
from jshard.plan.cost.traffic import Traffic, count, least
from jshard.plan.hlo import hlo
from jshard.plan.memory import buffers
from jshard.plan.memory.memory import Memory, memory
from jshard.plan.program import Program


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a job before it runs.

    Attributes:
      program: the traced step.
      text: the compiled program, in the order in which it runs.
      module: the same, parsed.
      memory: of a device, by part.
      traffic: the collectives of a step.
      timeline: when everything runs; None if the card is unknown (a CPU).
      options: of XLA that it was compiled with.
      seconds: time that compiling took.
    """

    program: Program
    text: str
    module: hlo.Module
    memory: Memory
    traffic: Traffic
    timeline: Timeline | None
    options: dict[str, Any]
    seconds: float

    @property
    def fits(self) -> bool | None:
        """Whether the step fits the card; None without a card."""
        return self.memory.fits

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """Between what a step may take, by the runs that confirm the constants."""
        gpu = self.program.gpu
        if gpu is None or self.timeline is None:
            return None
        return gpu.constants.range_of(self.timeline.seconds)

    @property
    def items_per_second(self) -> float | None:
        """Tokens (or examples) per second on all devices."""
        return self.timeline and self.program.items / self.timeline.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (``Program.mfu``)."""
        return self.timeline and self.program.mfu(self.timeline.seconds)


def make_plan(program: Program) -> Plan:
    """Compiles a program, and derives memory, traffic and timeline from it."""
    fsdp, mesh, gpu = program.job.fsdp, program.mesh, program.gpu
    start = time.perf_counter()
    # A program from JAX's cache would leave no buffer assignment.
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        compiled = program.compile(buffers.dump_options(folder))
        seconds = time.perf_counter() - start
        needed = memory(
            fsdp.policy, program.state, compiled, folder, devices=mesh.size, gpu=gpu
        )
    text = compiled.as_text() or ""
    module = hlo.parse(text)
    prefetch = platform(fsdp.mesh) == "gpu"
    return Plan(
        program,
        text,
        module,
        needed,
        Traffic(
            count(module, mesh.size, gpu),
            least(fsdp.mesh, fsdp.policy, program.state, prefetch=prefetch),
        ),
        None if gpu is None else replay(module, gpu, mesh.size),
        fsdp.compiler_options,
        seconds,
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    compilation_cache.reset_cache()  # the cache reads its settings only once
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()
