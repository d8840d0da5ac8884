"""Searches the ways to run a job for those that no other beats.

All combinations of what may vary are listed. Invalid ones are refused, and those whose
memory cannot fit are ruled out by arithmetic (``plan.search.estimates``). Those with
the best estimates are compiled, each in a process, and their schedules replayed.
"""

import collections
import contextlib
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jshard.plan.fit.hardware import GPU, find_constants
from jshard.plan.search.candidates import AXES, PIPE, REMAT, Candidate, candidates
from jshard.plan.search.estimated import Estimated, read_estimated, write_estimated
from jshard.plan.search.estimates import (
    Estimate,
    estimate,
    memory_bound,
    of_stage,
    ranked,
)
from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.processes import run_each
from jshard.plan.search.result_cache import read_result, write_result
from jshard.plan.search.traces import Traces
from jshard.plan.topology import devices, parse
from jshard.recipe.load import open_recipe
from jshard.sharding.settings import mesh as meshes
from jshard.system.cli.paths import cache_folder
from jshard.system.errors import UserError

Report = Callable[[int, int, str, Outcome], None]


class Asked(NamedTuple):
    """What to compile on a topology: the first of an order of its candidates."""

    found: Estimated
    order: Sequence[Candidate]
    limit: int


def search(
    path: str | Path,
    overrides: Mapping[str, Any],
    topology: str,
    allowed: Mapping[str, Sequence[Any] | None],
    *,
    limit: int = 50,
    constants: str = "fitted",
    report: Report = lambda *_: None,
) -> Search:
    """Compiles the promising ways to run a recipe's job on a topology.

    Args:
      path: of the recipe, for ``open_recipe``.
      overrides: the user's settings, values by key, which stay fixed.
      topology: "h100:64".
      allowed: what varies (``jshard.plan.search.candidates.parse_search``).
      limit: the most candidates to compile.
      constants: of the cost model, by name or a file (``find_constants``).
      report: called with (how many are done, of how many, the topology, the outcome).

    Raises:
      UserError: the topology, a key or a value is invalid.
    """
    with open_recipe(path) as recipe:
        traces = Traces(recipe, overrides)
        found = estimated(traces, topology, allowed, constants)
    order = ranked(found.estimates, found.gpu.usable)
    asked = [Asked(found, order, limit)]
    return compiled(path, overrides, asked, constants, report)[0]


def estimated(
    traces: Traces,
    topology: str,
    allowed: Mapping[str, Sequence[Any] | None],
    constants: str = "fitted",
) -> Estimated:
    """Estimates all candidates on a topology, or finds their estimates in the cache.

    Arguments as of ``search``.
    """
    gpu, _ = parse(topology)
    gpu = dataclasses.replace(gpu, constants=find_constants(constants))
    key, folder = traces.key(topology, gpu), cache_folder("plan")
    known = read_estimated(folder, topology, gpu, allowed, key) if key else None
    if known is not None:
        return known
    found = _estimated(traces, topology, gpu, allowed)
    if key:
        found = dataclasses.replace(found, key=key)
        write_estimated(folder, found, allowed)
    return found


def _estimated(
    traces: Traces,
    topology: str,
    gpu: GPU,
    allowed: Mapping[str, Sequence[Any] | None],
) -> Estimated:
    mesh_devices, configured = devices(topology), traces.configured()
    step = traces.step(topology, gpu, configured.settings.policy.remat)
    number = len(mesh_devices)
    axes = traces.axes(mesh_devices) if AXES in allowed else ()
    axes = axes or (["pipe"] if PIPE in allowed else [])
    everything = candidates(configured.values, gpu, number, allowed, step.names, axes)
    found: dict[Candidate, Estimate] = {}
    examples: dict[Candidate, int] = {}
    refused, too_large = [], []
    with warnings.catch_warnings(action="ignore"):  # what is compiled tells them
        for candidate in everything:
            try:
                sized = traces.sized(candidate, topology, mesh_devices)
            except UserError as error:
                refused.append((candidate, str(error)))
                continue
            policy, mesh = sized.policy, sized.mesh
            size = of_stage(sized.size, meshes.stages_of(mesh))
            bound = memory_bound(size, policy)
            if bound > gpu.usable:
                too_large.append((candidate, bound))
                continue
            remat = candidate.settings.get(REMAT, configured.settings.policy.remat)
            active = traces.step(topology, gpu, remat).activity
            inputs = 0.0
            if {meshes.TENSOR, meshes.CONTEXT} & {*mesh.shape}:
                inputs = traces.step(topology, gpu, "full").activity.saved
            each = sized.batch_size / mesh.size
            found[candidate] = estimate(size, policy, mesh, gpu, active, each, inputs)
            examples[candidate] = sized.batch_size
    return Estimated(
        topology,
        gpu,
        step.items,
        step.unit,
        found,
        examples,
        len(everything),
        refused,
        too_large,
        step.error,
    )


def compiled(
    path: str | Path,
    overrides: Mapping[str, Any],
    asked: Sequence[Asked],
    constants: str = "fitted",
    report: Report = lambda *_: None,
) -> list[Search]:
    """Compiles what is asked for, each candidate in a process, on every core."""
    chosen = [(x.found, candidate) for x in asked for candidate in x.order[: x.limit]]
    done: dict[str, list[tuple[Outcome, dict[str, Any]]]] = collections.defaultdict(
        list
    )
    with contextlib.closing(_replies(path, overrides, chosen, constants)) as replies:
        for number, (index, reply) in enumerate(replies, start=1):
            found, candidate = chosen[index]
            error, figures = reply.get("error", ""), reply.get("figures", {})
            usable = found.gpu.usable
            outcome = Outcome(candidate, **figures, usable=usable, error=error)
            done[found.topology].append((outcome, reply))
            report(number, len(chosen), found.topology, outcome)
    return [_searched(x, done[x.found.topology]) for x in asked]


def _replies(
    path: str | Path,
    overrides: Mapping[str, Any],
    chosen: Sequence[tuple[Estimated, Candidate]],
    constants: str,
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Yields (index, reply) of each that is chosen, those in the cache first."""
    folder, commands = cache_folder("plan"), {}
    worker = [sys.executable, "-m", "jshard.plan.search.worker", str(path)]
    for index, (found, candidate) in enumerate(chosen):
        if found.key and (known := read_result(folder, found.key_of(candidate))):
            yield index, known
            continue
        settings = json.dumps({**overrides, **candidate.settings})
        words = [found.topology, constants, str(folder), settings]
        commands[index] = [*worker, *words]
    # What this process imports; and compiling for absent GPUs runs on the CPU.
    imports = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": imports}
    at_a_time = os.cpu_count() or 1
    made = run_each([*commands.values()], environment, at_a_time=at_a_time)
    with contextlib.closing(made):
        for number, reply in made:
            index = [*commands][number]
            yield index, reply
            found, candidate = chosen[index]
            if found.key and (reply.get("refused") or not reply.get("error")):
                known = reply | {"figures": _from_cache(reply)}
                write_result(folder, found.key_of(candidate), known)


def _from_cache(reply: Mapping[str, Any]) -> dict[str, Any]:
    figures = reply.get("figures", {})
    return figures and figures | {"cached": True}


def _searched(asked: Asked, done: list[tuple[Outcome, dict[str, Any]]]) -> Search:
    """Returns the search of what was compiled, of which some may have been refused."""
    found = asked.found
    refused = [(x.candidate, x.error) for x, reply in done if reply.get("refused")]
    units = [reply["unit"] for _, reply in done if "unit" in reply]
    told = [text for _, reply in done for text in reply.get("warnings", ())]
    return Search(
        found.topology,
        units[-1] if units else found.unit,
        found.gpu.usable,
        [outcome for outcome, reply in done if not reply.get("refused")],
        found.considered,
        [*found.refused, *refused],
        found.too_large,
        list(asked.order[asked.limit :]),
        [*dict.fromkeys(told)],
    )
