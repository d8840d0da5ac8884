"""A process that compiles candidates.

    python -m jshard.plan.search.worker RECIPE TOPOLOGY [CONSTANTS]

A line of JSON on its standard input is a task, a line on its standard output the reply,
until its input ends. What libraries print goes to its standard error.
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

from jshard.errors import UserError
from jshard.plan.ahead_of_time import compile_lowered, lower_for_gpus
from jshard.plan.constants import STATED, Constants, read_constants
from jshard.plan.program import Program, trace
from jshard.plan.search.cache import Cache, program_key
from jshard.plan.search.estimates import activity
from jshard.plan.search.evaluation import measure
from jshard.training.config.command_line import override
from jshard.training.config.config import Config, check, complete
from jshard.training.recipe import Recipe, open_recipe
from jshard.unit.remat import names_in


def make_config(recipe: Recipe, settings: dict[str, str]) -> Config:
    """The config that training would have, with text by key over the recipe's own.

    Raises:
      UserError: a key or a value is not possible.
    """
    config = complete(recipe.get_config(), recipe.name)
    override(config, settings, recipe.name)
    check(config)
    return config


def do(
    recipe: Recipe,
    topology: str,
    task: dict[str, Any],
    constants: Constants = STATED,
) -> dict[str, Any]:
    """Does one task.

    Args:
      recipe: what to train.
      topology: on what.
      task: "settings", text by key; and "cache", a folder. Without the latter the
        program is only traced.
      constants: of the cost model.

    Returns:
      Of a traced program the "activity" (``estimates.Activity``) and the
      "names" of its activations. Of a compiled one its ``measure``, the "rate" in
      a "unit" (tokens) a second, "mfu", and whether it was "cached".
    """
    program = trace(recipe, make_config(recipe, task["settings"]), topology, constants)
    if "cache" not in task:
        return _look(program)
    lowered = lower_for_gpus(program.traced)
    cache = Cache(Path(task["cache"]))
    key = program_key(program, lowered.as_text())
    result = cache.read(key)
    cached = result is not None
    if result is None:
        options = program.job.fsdp.compiler_options
        result = measure(program, compile_lowered(program.mesh, lowered, options))
        cache.write(key, result)
    return result | {
        "rate": program.items / result["seconds"],
        "unit": program.unit,
        "mfu": program.mfu(result["seconds"]),
        "cached": cached,
    }


def _look(program: Program) -> dict[str, Any]:
    names = sorted({*names_in(program.traced.jaxpr.jaxpr)})
    return {"activity": vars(activity(program)), "names": names}


def main() -> None:
    """Serves tasks until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, topology, *rest = sys.argv[1:]
    constants = read_constants(Path(rest[0])) if rest else STATED
    tasks: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, tasks), daemon=True).start()
    with open_recipe(path) as recipe:
        while True:
            print(
                json.dumps(_answer(recipe, topology, tasks.get(), constants)),
                file=replies,
            )
            replies.flush()


def _listen(lines: TextIO, tasks: SimpleQueue) -> None:
    for line in lines:
        tasks.put(json.loads(line))
    os._exit(0)  # also in the middle of compiling: nobody waits any more


def _answer(
    recipe: Recipe, topology: str, task: dict[str, Any], constants: Constants
) -> dict[str, Any]:
    """The reply, warnings included; an exception is one, too, and told in full."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            reply = do(recipe, topology, task, constants)
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
