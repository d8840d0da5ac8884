"""A plan: what a job needs, moves and takes, from its compiled program alone."""

import dataclasses
import time
from typing import Any

from jshard.plan import hlo
from jshard.plan.program import Program
from jshard.plan.timeline import Timeline, replay


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a job before it runs.

    Attributes:
      program: what was compiled.
      module: its schedule.
      timeline: when everything runs; None where the card is not known (a CPU).
      options: of XLA that it was compiled with.
      seconds: that compiling took.
    """

    program: Program
    module: hlo.Module
    timeline: Timeline | None
    options: dict[str, Any]
    seconds: float

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
    """Compiles a program and replays it."""
    start = time.perf_counter()
    module = hlo.parse(program.compile().as_text())
    seconds = time.perf_counter() - start
    timeline = None
    if program.gpu is not None:
        timeline = replay(module, program.gpu, program.mesh.size)
    options = program.job.fsdp.compiler_options
    return Plan(program, module, timeline, options, seconds)
