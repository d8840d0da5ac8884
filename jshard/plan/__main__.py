"""Plans a recipe: `python -m jshard.plan --config=llama.py:3-8b --topology=h100:64`.

With `--from-hlo=FILE` in place of a recipe it plans a program that XLA has compiled.

Exit codes:
  0: The step fits the card, or there is no card to compare with.
  1: A bug.
  2: Bad input; one line says what to do.
  3: The step does not fit; with --search, nothing that was compiled fits.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from jshard.plan import search_command, topology
from jshard.plan.any_program import plan_file
from jshard.plan.cost.assumptions import assumed
from jshard.plan.fit.hardware import find_constants
from jshard.plan.fit.memory_choice import DoesNotFit
from jshard.plan.output import (
    comparison_text,
    plan_json,
    plan_page,
    plan_text,
)
from jshard.plan.output.plan_files import check_files, write_file
from jshard.plan.planning import Plan, plan_recipe
from jshard.plan.program import ATTACHED, find_gpu
from jshard.plan.search import candidates
from jshard.plan.search_command import DOES_NOT_FIT
from jshard.plan.trace.comparison import Comparison, compare
from jshard.plan.trace.constants_fit import fit_constants
from jshard.plan.trace.profile_reader import Profile, read_profile
from jshard.recipe.config.overrides import keys_help
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config, read_keys
from jshard.recipe.recipe_path import RECIPE_OPTIONS
from jshard.recipe.schedule.epochs import set_epochs, take_epochs
from jshard.system.cli.command import run_command
from jshard.system.cli.machine.platform import choose_platform, make_cpu_devices
from jshard.system.cli.options import Command, Option
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError

_FILE: dict[str, Any] = {
    "kind": Path, "bucket": True, "hub": "dataset", "shown": "FILE",
}  # fmt: skip
COMMAND = Command(
    "plan",
    "Compiles the step that training would run, for GPUs that need not be present, and "
    "prints its memory, traffic and timeline. Exits 0 if the step fits, 3 if it does "
    "not, 2 on bad input.",
    {
        "config": dataclasses.replace(RECIPE_OPTIONS["config"], required=False),
        "config.KEY": RECIPE_OPTIONS["config.KEY"],
        "from-hlo": Option(
            None, "plans, in place of a recipe, a program that XLA has compiled for "
            "these GPUs, from its text: what compiled.as_text() returns, or a "
            "*_after_optimizations.txt of XLA's dumps", kind=Path, shown="FILE",
        ),
        "topology": Option(
            None, "the GPUs to plan for, e.g. h100:64, eight per host (four for GB200 "
            f"and GB300); GPU is one of {', '.join(topology.GPUS)}, or a file of your "
            f"own cluster, e.g. cluster.toml:64, and {ATTACHED} stands for this "
            "machine's devices (no timeline on CPUs)", kind=str, shown="GPU:NUMBER",
        ),
        "topologies": Option(
            None, "asks which GPUs, how many, how long and how much: finds the fastest "
            "way to train on each of these, e.g. h100:8..512,h200:64 (numbers are "
            "doubled; h100:.. is h100:8..1024), and those that no other beats in days "
            "and cost. Takes --tokens, and the options of --search", kind=str,
            shown="GPU:FROM..TO,...",
        ),
        "tokens": Option(
            None, "with --topologies, how many tokens (or examples) to train on, e.g. "
            "15e12", kind=float, at_least=1,
        ),
        "prices": Option(
            None, "with --topologies, a TOML file with a price per GPU and hour for "
            "each kind; jshard has none of its own", kind=Path, shown="FILE",
        ),
        "days": Option(
            None, "with --topologies, the most days that training may take",
            kind=float, above=0,
        ),
        "budget": Option(
            None, "with --prices, the most that training may cost", kind=float, above=0,
        ),
        "constants": Option(
            "fitted", "how fast the GPU is: fitted to published runs, stated, or a "
            "file, as benchmarks/gpu.py writes it", kind=Path, shown="NAME",
        ),
        "imbalance": Option(
            1.0, "the most tokens that a device sends to one expert, as a multiple of "
            "an even share", at_least=1,
        ),
        "profile": Option(
            None, "reads what jax.profiler wrote of the step, e.g. a run's folder with "
            "profile.steps, and prints where it deviated from the plan (on CPUs, from "
            "the median step)", kind=Path, shown="DIR",
        ),
        "baseline": Option(
            None, "with --profile, a profile of the same step as it should go, e.g. "
            "before a change of flags: its medians are expected in place of the plan",
            kind=Path, shown="DIR",
        ),
        "fit": Option(
            None, "with --profile, writes the constants of the cost model that it "
            "shows, for --constants", kind=Path, shown="FILE",
        ),
        "json": Option(
            None, "writes the plan as data, with all gaps of the timeline", **_FILE
        ),
        "html": Option(None, "writes a page with an interactive timeline", **_FILE),
        "trace": Option(None, "writes the timeline for ui.perfetto.dev", **_FILE),
        "hlo": Option(
            None, "writes the compiled program, in the order in which it runs", **_FILE
        ),
        "search": Option(
            (), "tries other ways to run the same training, and prints the Pareto set "
            "of speed and memory, with command lines; keys that are given stay fixed. "
            "Only the named knobs vary, or all of these: "
            f"{', '.join(candidates.DEFAULT_KNOBS)}. axes are the other mesh axes "
            "that the model supports; name one to vary it alone: mesh.context. Only "
            "varied when named, because they change the computation: "
            f"{', '.join(candidates.CHANGING_KNOBS)}",
            kind=str, repeats=True, bare="", shown="KNOB,...",
        ),
        "search.KEY": Option("", "varies any key over these values", shown="A,B"),
        "limit": Option(
            None, "the largest number of candidates to compile: with --search 50, with "
            "--topologies 2 for each that may be best, unless it is given", kind=int,
            at_least=1, at_most=10**9,
        ),
    },
    notes=(
        f"The timeline's model: {assumed()}.",
        "docs/plan.md lists what it leaves out.",
    ),
)  # fmt: skip
_FILES: dict[str, Callable[[Plan, Comparison | None], str]] = {
    "json": lambda plan, found: json.dumps(_data(plan, found), indent=1) + "\n",
    "html": plan_page.render,
    "trace": lambda plan, found: json.dumps(plan_json.trace(plan)) + "\n",
    "hlo": lambda plan, found: plan.text,
}


def _data(plan: Plan, found: Comparison | None) -> dict[str, Any]:
    data = plan_json.as_json(plan)
    return data if found is None else data | {"profile": comparison_text.as_json(found)}


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
    arguments = COMMAND.parse(argv)
    where = arguments.topology
    if arguments.from_hlo and not arguments.help:
        _plan_file(arguments)
        return
    if arguments.config is None:
        raise UserError("--config=FILE is missing, or --from-hlo=FILE; see --help")
    path = find_recipe(str(arguments.config))
    _choose_platform(ATTACHED if arguments.help else where)
    if not arguments.help:
        _check_where(arguments)
        check_files(arguments, (*_FILES, "fit"))
    speed = find_constants(str(arguments.constants))
    with open_recipe(path) as recipe:
        if arguments.help:
            config = complete(recipe.get_config(), recipe.name)
            show(f"{COMMAND.help()}\n{keys_help(config, recipe.name)}", end="")
            return
        words, epochs = take_epochs(arguments.config_keys, recipe)
        given = read_keys(recipe, words)
        config = make_config(recipe, given)
        set_epochs(recipe, config, epochs)
        configured = configure(recipe, config)
        settings = configured.settings
        given |= {"steps": settings.steps} if epochs else {}
        if arguments.topologies:
            search_command.ask_all(arguments, configured, given)
            return
        if arguments.search or arguments.search_keys:
            search_command.search_one(arguments, configured, given)
            return
        make_cpu_devices(settings.mesh.cpu_devices)
        if arguments.trace and find_gpu(where) is None:
            raise UserError(
                f"--trace={arguments.trace}: there is no timeline: the speed of "
                f"these devices is unknown ({', '.join(topology.GPUS)} are known)"
            )
        traced = _read_profiles(arguments)
        plan = plan_recipe(configured, where, speed, arguments.imbalance)
        _show(plan, traced, arguments)


def _choose_platform(where: str | None) -> None:
    """Selects the CPU for absent GPUs, too, for which it compiles."""
    choose_platform()
    if where != ATTACHED:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")


def _plan_file(arguments: SimpleNamespace) -> None:
    for name in ("config", "search", "topologies", "imbalance"):
        if getattr(arguments, name) != COMMAND.options[name].default:
            raise UserError(f"--{name}: is of a recipe, and --from-hlo plans a file")
    if arguments.config_keys or arguments.search_keys:
        raise UserError("--config.KEY: is of a recipe, and --from-hlo plans a file")
    where = arguments.topology
    if where is None:
        raise UserError("--topology=GPU:NUMBER is missing; see --help")
    _choose_platform(where)
    if where != ATTACHED:
        topology.parse(where)
    _check_profile(arguments)
    check_files(arguments, (*_FILES, "fit"))
    speed = find_constants(str(arguments.constants))
    traced = _read_profiles(arguments)
    _show(plan_file(arguments.from_hlo, where, speed), traced, arguments)


def _read_profiles(arguments: SimpleNamespace) -> list[Profile]:
    """Reads the profile and its baseline, if given, before minutes of compiling."""
    given = [path for path in (arguments.profile, arguments.baseline) if path]
    return [read_profile(path) for path in given]


def _show(plan: Plan, traced: list[Profile], arguments: SimpleNamespace) -> None:
    """Prints a plan and writes it to files; exits with 3 if it does not fit."""
    if arguments.trace and plan.timeline is None:
        raise UserError(
            f"--trace={arguments.trace}: there is no timeline: the speed of "
            f"these devices is unknown ({', '.join(topology.GPUS)} are known)"
        )
    show("\n".join(plan_text.lines(plan)))
    found = None
    if traced:
        found = compare(plan, *traced)
        show("\n".join(["", *comparison_text.lines(found)]))
        if arguments.fit:
            fitted = fit_constants(plan, found)
            show("\n".join(fitted.lines()))
            write_file(
                "fit", arguments.fit, json.dumps(fitted.as_json(), indent=1) + "\n"
            )
    for name, content in _FILES.items():
        if file := getattr(arguments, name):
            write_file(name, file, content(plan, found))
    if plan.fits is False:
        sys.exit(DOES_NOT_FIT)


def _check_where(arguments: SimpleNamespace) -> None:
    """Raises UserError unless there is one topology, or a good question about many."""
    where, many = arguments.topology, arguments.topologies
    if (where is None) == (many is None):
        both = (
            "is missing" if many is None else "is given beside --topologies; drop one"
        )
        raise UserError(f"--topology=GPU:NUMBER {both}; see --help")
    for name in ("tokens", "prices", "days", "budget"):
        if many is None and getattr(arguments, name) is not None:
            raise UserError(f"--{name}: is asked of many topologies: --topologies=...")
    if many is not None:
        search_command.check_question(arguments)
    elif where != ATTACHED:
        topology.parse(where)
        topology.require_plugin()
    _check_profile(arguments)


def _check_profile(arguments: SimpleNamespace) -> None:
    """Raises UserError for what needs a profile, or cannot take one."""
    fit, baseline = arguments.fit, arguments.baseline
    if arguments.profile is None:
        if fit:
            raise UserError(f"--fit={fit}: fits constants to a --profile=DIR")
        if baseline:
            raise UserError(f"--baseline={baseline}: is compared with a --profile=DIR")
        return
    if arguments.topologies or arguments.search or arguments.search_keys:
        raise UserError(
            f"--profile={arguments.profile}: is compared with one plan, and --search "
            "and --topologies make many; drop one"
        )
    if fit and baseline:
        raise UserError(
            f"--baseline={baseline}: stands in for the plan, which --fit needs; drop "
            "one"
        )


if __name__ == "__main__":
    main()
