"""Plans a recipe: `python -m jshard.plan --config=llama.py:3-8b --topology=h100:64`.

Exit codes:
  0: The step fits the card, or there is no card to compare with.
  1: A bug.
  2: Bad input; one line says what to do.
  3: The step does not fit; with --search, nothing that was compiled fits.
"""

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import jax

from jshard.checkpoint.atomic import replace_file
from jshard.cli.command import run_command
from jshard.cli.platform import choose_platform, make_cpu_devices
from jshard.cli.quiet import without_remarks
from jshard.cli.terminal import show
from jshard.config.parser import (
    Arguments,
    help_text,
    parse_arguments,
)
from jshard.config.run_config import complete, flatten
from jshard.config.shared_keys import FITTED
from jshard.errors import UserError
from jshard.fit.hardware import find_constants
from jshard.fit.memory_choice import DoesNotFit, is_open
from jshard.plan import topology
from jshard.plan.cost.assumptions import assumed
from jshard.plan.output import plan_json, plan_page, plan_text, search_text
from jshard.plan.planning import Plan, plan_recipe
from jshard.plan.program import ATTACHED, find_gpu
from jshard.plan.search import candidates
from jshard.plan.search.pareto_search import search
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

DOES_NOT_FIT = 3
USAGE = f"""\
usage: python -m jshard.plan --config=FILE --topology=GPU:NUMBER
                             [--config.KEY=VALUE ...]
                             [--constants=stated|fitted|FILE]
                             [--json=FILE] [--html=FILE] [--trace=FILE] [--hlo=FILE]
                             [--search[=KNOB,...] [--search.KEY=A,B] [--limit=50]]

Compiles the step that training would run, for GPUs that need not be present, and prints
its memory, traffic and timeline. Exits 0 if the step fits, 3 if it does not, 2 on bad
input.

  --config=FILE       the recipe: a path, a file in ./train/, or a packaged recipe
  --config.KEY=VALUE  sets one of the recipe's keys, e.g. --config.policy.remat=dots
  --topology=h100:64  this many GPUs, eight per host: {", ".join(topology.GPUS)}; or
                      {ATTACHED}: this machine's devices (no timeline on CPUs)
  --constants=NAME    how fast the GPU is: fitted to published runs (the default),
                      stated, or a file, as benchmarks/gpu.py writes it
  --json=FILE         everything below as data, with all gaps
  --html=FILE         a page with an interactive timeline
  --trace=FILE        the timeline for ui.perfetto.dev
  --hlo=FILE          the compiled program, in the order in which it runs
  --search            tries other ways to run the same training, and prints the Pareto
                      set of speed and memory, with command lines; keys that are given
                      stay fixed
  --search=KNOB,...   varies only these: {", ".join(candidates.DEFAULT_KNOBS[:4])},
                      {", ".join(candidates.DEFAULT_KNOBS[4:])}.
                      axes are the further mesh axes that the model supports, or name
                      one: mesh.context. Only varied when named, because they change
                      the computation: {", ".join(candidates.CHANGING_KNOBS)}
  --search.KEY=A,B    varies any key of the config over these values
  --limit=50          the largest number of candidates to compile
  --help              this text, and the keys of the recipe when --config is given

{textwrap.fill(f"The timeline's model: {assumed()}.", 88)}
docs/plan.md lists what it leaves out.
"""
_FILES: dict[str, Callable[[Plan], str]] = {
    "json": lambda plan: json.dumps(plan_json.as_json(plan), indent=1) + "\n",
    "html": plan_page.render,
    "trace": lambda plan: json.dumps(plan_json.trace(plan)) + "\n",
    "hlo": lambda plan: plan.text,
}


def main() -> None:
    """Runs the command line; exits with the codes above."""
    run_command(_plan_or_refuse)


def _plan_or_refuse(argv: list[str]) -> None:
    try:
        _plan(argv)
    except DoesNotFit as error:
        show(f"jshard: error: {error}", error=True)
        sys.exit(DOES_NOT_FIT)


def _plan(argv: list[str]) -> None:
    searched = [word for word in argv if re.match(r"--search(\W|$)", word)]
    words = [word for word in argv if word not in searched]
    own = ("topology", "constants", *_FILES, *(["limit"] if searched else []))
    arguments = parse_arguments(words, own)
    options, where = arguments.options, arguments.options.get("topology")
    if arguments.recipe is None:
        if not arguments.help:
            raise UserError(
                "which recipe? for example --config=llama.py:3-8b; see --help"
            )
        show(USAGE, end="")
        return
    path = find_recipe(arguments.recipe)
    if not arguments.help:
        _check_topology(where)
        _check_files(options)
    constants = options.get("constants", "fitted")
    speed = find_constants(constants)
    if where in (None, ATTACHED):
        choose_platform()
    else:  # compiling for absent GPUs runs on the CPU
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    if searched and not arguments.help:
        _search(searched, arguments, path, constants)
        return
    with open_recipe(path) as recipe:
        with without_remarks():
            if arguments.help:
                config = complete(recipe.get_config(), recipe.name)
                show(help_text(config, recipe.name, USAGE), end="")
                return
            config = make_config(recipe, arguments.overrides)
            make_cpu_devices(config.mesh.cpu_devices)
            if "trace" in options and find_gpu(where or "") is None:
                raise UserError(
                    f"--trace={options['trace']}: there is no timeline: the speed of "
                    f"these devices is unknown ({', '.join(topology.GPUS)} are known)"
                )
            plan = plan_recipe(recipe, config, where or "", speed)
        show("\n".join(plan_text.lines(plan)))
        for name, content in _FILES.items():
            if name in options:
                _write(name, options[name], content(plan))
    if plan.fits is False:
        sys.exit(DOES_NOT_FIT)


def _search(words: list[str], arguments: Arguments, path: str, constants: str) -> None:
    options = arguments.options
    for name in ("html", "trace", "hlo"):
        if name in options:
            raise UserError(
                f"--{name}: shows one plan, and --search makes many; plan the "
                "candidate that it finds"
            )
    limit = options.get("limit", "50")
    if not limit.isdecimal() or len(limit) > 9 or int(limit) < 1:
        raise UserError(f"--limit={limit}: must be a number of candidates")
    recipe, overrides = arguments.recipe or "", arguments.overrides
    allowed = candidates.parse_search(words, overrides)
    overrides = _chosen(path, overrides, options["topology"]) | overrides
    with without_remarks():
        found = search(
            path,
            overrides,
            options["topology"],
            allowed,
            limit=int(limit),
            constants=constants,
            report=search_text.report,
        )
    for warning in found.warnings:
        show(f"jshard: warning: {warning}", error=True)
    command = lambda candidate: candidate.command(recipe, overrides)
    show("\n".join(search_text.lines(found, command, allowed)))
    if "json" in options:
        _write("json", options["json"], json.dumps(found.as_dict(), indent=1) + "\n")
    if not found.best:
        sys.exit(DOES_NOT_FIT)


def _chosen(path: str, overrides: dict[str, str], where: str) -> dict[str, str]:
    """Returns what training would choose of keys that are "fit"; a search begins there.

    Raises:
      DoesNotFit: no choice fits.
    """
    with open_recipe(path) as recipe, without_remarks():
        config = make_config(recipe, overrides)
        if not is_open(config):
            return {}
        chosen = flatten(plan_recipe(recipe, config, where).program.job.config)
    return {key: str(chosen[key]) for key in FITTED}


def _check_topology(where: str | None) -> None:
    if where is None:
        raise UserError(
            "for which devices? for example --topology=h100:64, or "
            f"--topology={ATTACHED} for this machine's"
        )
    if where != ATTACHED:
        topology.parse(where)
        topology.require_plugin()


def _check_files(options: dict[str, str]) -> None:
    """Raises UserError for a file that could not be written in the end."""
    for name in _FILES:
        if name in options:
            path = Path(options[name])
            if path.is_dir():
                raise UserError(f"--{name}={path}: this is a folder")
            if not path.parent.is_dir():
                raise UserError(f"--{name}={path}: there is no folder {path.parent}")
            if not os.access(path.parent, os.W_OK):
                raise UserError(f"--{name}={path}: cannot write in {path.parent}")


def _write(name: str, path: str, text: str) -> None:
    try:
        replace_file(Path(path), text)
    except OSError as error:
        raise UserError(f"--{name}={path}: {error.strerror}") from error


if __name__ == "__main__":
    main()
