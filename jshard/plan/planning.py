"""A plan: what a job needs, moves and takes, from its compiled program alone."""

import dataclasses
import tempfile
import time
from typing import Any

import jax

from jshard.mesh import platform
from jshard.plan import buffers, hlo
from jshard.plan.memory import Memory, memory
from jshard.plan.program import Program
from jshard.plan.timeline import Timeline, replay
from jshard.plan.traffic import Traffic, count, least


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a job before it runs.

    Attributes:
      program: what was compiled.
      text: the compiled program, in the order in which it runs.
      module: the same, read.
      memory: of a device, by part.
      traffic: the collectives of a step.
      timeline: when everything runs; None where the card is not known (a CPU).
      options: of XLA that it was compiled with.
      seconds: that compiling took.
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
        """Whether the step fits the card; None where there is no card."""
        return self.memory.fits

    @property
    def items_per_second(self) -> float | None:
        """Tokens (or examples) a second of all devices."""
        return self.timeline and self.program.items / self.timeline.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: of the dense bf16 peak of all devices."""
        job, gpu = self.program.job, self.program.gpu
        of_token = job.recipe.flops_per_token
        if self.items_per_second is None or gpu is None or of_token is None:
            return None
        needed = of_token(job.config) * self.items_per_second
        return needed / (gpu.flops * self.program.mesh.size)


def make_plan(program: Program) -> Plan:
    """Compiles a program, and reads memory, traffic and timeline from it."""
    job, mesh, gpu = program.job, program.mesh, program.gpu
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dump = folder if gpu is not None else None
        compiled = program.compile(buffers.dump_options(folder) if dump else None)
        seconds = time.perf_counter() - start
        needed = _memory(program, compiled, dump)
    text = compiled.as_text() or ""
    module = hlo.parse(text)
    ahead = platform(job.fsdp.mesh) == "gpu"
    traffic = Traffic(
        count(module, mesh.size, gpu),
        least(job.fsdp.mesh, job.fsdp.policy, program.state, prefetch=ahead),
    )
    timeline = None if gpu is None else replay(module, gpu, mesh.size)
    return Plan(
        program,
        text,
        module,
        needed,
        traffic,
        timeline,
        job.fsdp.compiler_options,
        seconds,
    )


def _memory(
    program: Program, compiled: jax.stages.Compiled, dump: str | None
) -> Memory:
    fsdp = program.job.fsdp
    return memory(
        fsdp.mesh,
        fsdp.policy,
        program.state,
        program.traced,
        gpu=program.gpu,
        ahead=program.gpu is not None,
        compiled=compiled,
        dump=dump,
    )
