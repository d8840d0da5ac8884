"""A process that compiles a candidate.

    python -m jshard.plan.search.worker RECIPE TOPOLOGY CONSTANTS CACHE SETTINGS

SETTINGS and what it prints are JSON. What libraries print goes to standard error.
"""

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

from jshard.plan import hlo
from jshard.plan.cost.ticks import pipeline_of
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import find_constants
from jshard.plan.planning import kind_of_step
from jshard.plan.program import Program, trace
from jshard.plan.search.result_cache import program_key, read_result, write_result
from jshard.plan.start_up import has_experts
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.system.compat import absent_gpus
from jshard.system.errors import UserError


def compile_program(program: Program, cache: Path) -> dict[str, Any]:
    """Compiles a candidate's program, or finds its result in the cache.

    The reply has the "figures" of an ``Outcome`` and their "unit".
    """
    lowered = absent_gpus.lower(program.traced)
    key = program_key(program, lowered.as_text())
    result = read_result(cache, key)
    cached = result is not None
    if result is None:
        compiled = absent_gpus.compile_lowered(lowered, program.mesh, program.options)
        assert program.gpu is not None
        module = hlo.parse(compiled.as_text() or "")
        pipeline = pipeline_of(module, program.mesh, program.job.fsdp.policy)
        timeline = replay(module, program.gpu, program.mesh.size, pipeline)
        experts = has_experts(program.jaxpr)
        kind = kind_of_step(timeline, program.gpu, experts)
        result = {
            "kind": kind,
            "range": program.gpu.constants.range_of(timeline.seconds, kind),
            "seconds": timeline.seconds,
            "exposed": timeline.exposed,
            "memory": compiled_bytes(compiled),
            "host": compiled_bytes(compiled, "host_"),
        }
        write_result(cache, key, result)
    seconds = result["seconds"]
    speed = {"rate": program.items / seconds, "mfu": program.mfu(seconds)}
    return {"figures": result | speed | {"cached": cached}, "unit": program.unit}


def reply_to(
    path: str, topology: str, constants: str, cache: str, settings: str
) -> dict[str, Any]:
    """Compiles a candidate; returns its figures or its error, and jshard's warnings."""
    speed = find_constants(constants)
    with open_recipe(path) as recipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            config = make_config(recipe, json.loads(settings))
            program = trace(configure(recipe, config), topology, speed)
            reply = compile_program(program, Path(cache))
        except UserError as error:
            reply = {"error": str(error), "refused": True}
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            reply = {"error": f"{type(error).__name__}: {first}"}
    ours = [str(w.message) for w in caught if w.category is UserWarning]
    return reply | {"warnings": ours}


def main() -> None:
    """Prints the reply; ends with the search, even in the middle of compiling."""
    threading.Thread(target=_end_with_search, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        json.dump(reply_to(*sys.argv[1:]), replies)


def _end_with_search() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would be held at the end
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
