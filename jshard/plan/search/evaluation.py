"""What a search keeps of a compiled program: its time and its memory."""

from typing import Any

import jax

from jshard.plan.cost.timeline import replay
from jshard.plan.hlo import hlo
from jshard.plan.memory.memory import device_total, host_total
from jshard.plan.program import Program


def measure(program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Replays a compiled program of a known card, and reads its memory.

    Returns:
      "seconds" a step, of these "exposed", bytes of device "memory" and of "host"
      memory, each of one device.
    """
    assert program.gpu is not None
    time = replay(hlo.parse(compiled.as_text() or ""), program.gpu, program.mesh.size)
    return {
        "seconds": time.seconds,
        "exposed": time.exposed,
        "memory": device_total(compiled),
        "host": host_total(compiled),
    }
