"""A process that compiles candidates.

    python -m jshard.plan.search.worker RECIPE TOPOLOGY [CONSTANTS]

It reads tasks from standard input and writes replies to standard output, one line of
JSON each, until its input ends. What libraries print goes to standard error.
"""

import json
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from jshard.plan import hlo
from jshard.plan.cost.ticks import pipeline_of
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import Constants, find_constants
from jshard.plan.program import trace
from jshard.plan.search.result_cache import program_key, read_result, write_result
from jshard.recipe.definition import Recipe
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.system.compat import absent_gpus
from jshard.system.errors import UserError


def run_task(
    recipe: Recipe, topology: str, task: dict[str, Any], constants: Constants
) -> dict[str, Any]:
    """Compiles a candidate, or finds its result in the cache.

    The task has "settings", values by key, and the "cache" folder; the reply the
    "figures" of an ``Outcome`` and their "unit".
    """
    program = trace(recipe, make_config(recipe, task["settings"]), topology, constants)
    lowered = absent_gpus.lower(program.traced)
    folder, key = Path(task["cache"]), program_key(program, lowered.as_text())
    result = read_result(folder, key)
    cached = result is not None
    if result is None:
        compiled = absent_gpus.compile_lowered(lowered, program.mesh, program.options)
        assert program.gpu is not None
        module = hlo.parse(compiled.as_text() or "")
        pipeline = pipeline_of(module, program.mesh, program.job.fsdp.policy)
        timeline = replay(module, program.gpu, program.mesh.size, pipeline)
        result = {
            "seconds": timeline.seconds,
            "exposed": timeline.exposed,
            "memory": compiled_bytes(compiled),
            "host": compiled_bytes(compiled, "host_"),
        }
        write_result(folder, key, result)
    seconds = result["seconds"]
    speed = {"rate": program.items / seconds, "mfu": program.mfu(seconds)}
    return {"figures": result | speed | {"cached": cached}, "unit": program.unit}


def main() -> None:
    """Serves tasks until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, topology, name = sys.argv[1:]
    constants = find_constants(name)
    tasks: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, tasks), daemon=True).start()
    with open_recipe(path) as recipe:
        while True:
            reply = _reply(recipe, topology, tasks.get(), constants)
            print(json.dumps(reply), file=replies, flush=True)


def _listen(lines: TextIO, tasks: SimpleQueue) -> None:
    for line in lines:
        tasks.put(json.loads(line))
    os._exit(0)  # even in the middle of compiling: the parent process has ended


def _reply(
    recipe: Recipe, topology: str, task: dict[str, Any], constants: Constants
) -> dict[str, Any]:
    """Runs a task; returns its reply, or its error, with jshard's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            reply = run_task(recipe, topology, task, constants)
        except UserError as error:
            reply = {"error": str(error), "refused": True}
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            reply = {"error": f"{type(error).__name__}: {first}"}
    ours = [str(w.message) for w in caught if w.category is UserWarning]
    return reply | {"warnings": ours}


if __name__ == "__main__":
    main()
