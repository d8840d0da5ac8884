"""Searches the ways to run a job for those that no other beats.

All combinations of what may vary are listed. Invalid ones are refused, and those whose
memory cannot fit are ruled out by arithmetic (``plan.search.estimates``). Those with
the best estimates are compiled, each in a process, and their schedules replayed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.plan.fit.hardware import GPU, find_constants
from jshard.plan.program import check_batch_size, trace
from jshard.plan.search.candidates import (
    AXES,
    PIPE,
    REMAT,
    RESHARD,
    Candidate,
    candidates,
)
from jshard.plan.search.estimates import (
    Activity,
    Estimate,
    StateSize,
    activity,
    estimate,
    memory_bound,
    of_stage,
    ranked,
    state_size,
)
from jshard.plan.search.outcomes import Outcome, Search
from jshard.plan.search.processes import run_each
from jshard.plan.topology import devices, parse
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import Configured, configure
from jshard.recipe.definition import Recipe
from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.sharding.settings import mesh as meshes
from jshard.sharding.step.program.refusals import names_in
from jshard.system.cli.paths import cache_folder
from jshard.system.errors import UserError

# Keys on which neither the size nor the placement of a state depends.
_NOT_OF_STATE = (
    REMAT,
    "policy.accumulate",
    "policy.defer_scatter",
    RESHARD,
    "policy.precision.reduce",
    "policy.precision.sum",
    "batch_size",
)


def search(
    path: str | Path,
    overrides: Mapping[str, Any],
    topology: str,
    allowed: Mapping[str, Sequence[Any] | None],
    *,
    limit: int = 50,
    constants: str = "fitted",
    report: Callable[[int, int, Outcome], None] = lambda *_: None,
) -> Search:
    """Compiles the promising ways to run a recipe's job on a topology.

    Args:
      path: of the recipe, for ``open_recipe``.
      overrides: the user's settings, values by key, which stay fixed.
      topology: "h100:64".
      allowed: what varies (``jshard.plan.search.candidates.parse_search``).
      limit: the most candidates to compile.
      constants: of the cost model, by name or a file (``find_constants``).
      report: called with (how many are done, of how many, the outcome).

    Raises:
      UserError: the topology, a key or a value is invalid.
    """
    gpu, number = parse(topology)
    gpu = dataclasses.replace(gpu, constants=find_constants(constants))
    mesh_devices = devices(topology)
    with open_recipe(path) as recipe:
        configured = configure(recipe, make_config(recipe, overrides))

        @functools.cache
        def traced(remat: str) -> tuple[Activity, list[str]]:
            settings = {**overrides, REMAT: remat, RESHARD: True}
            return _trace(recipe, topology, settings)

        _, names = traced(configured.settings.policy.remat)
        axes = _axes(configured, mesh_devices) if AXES in allowed else ()
        axes = axes or (["pipe"] if PIPE in allowed else [])
        everything = candidates(configured.values, gpu, number, allowed, names, axes)
        promising, refused, too_large = _estimates(
            recipe, mesh_devices, gpu, traced, everything, overrides
        )
    order = ranked(promising, gpu.usable)
    chosen, untried = order[:limit], order[limit:]
    worker = [sys.executable, "-m", "jshard.plan.search.worker"]
    worker += [str(path), topology, constants, str(cache_folder("plan"))]
    commands = [
        [*worker, json.dumps({**overrides, **candidate.settings})]
        for candidate in chosen
    ]
    # What this process imports; and compiling for absent GPUs runs on the CPU.
    imports = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": imports}
    outcomes, unit, told = [], "tokens", dict[str, None]()
    compiled = run_each(commands, environment, at_a_time=os.cpu_count() or 1)
    with contextlib.closing(compiled):
        for done, (index, reply) in enumerate(compiled, start=1):
            error, figures = reply.get("error", ""), reply.get("figures", {})
            outcome = Outcome(chosen[index], **figures, usable=gpu.usable, error=error)
            unit = reply.get("unit", unit)
            told |= dict.fromkeys(reply.get("warnings", ()))
            if reply.get("refused"):
                refused.append((outcome.candidate, outcome.error))
            else:
                outcomes.append(outcome)
            report(done, len(chosen), outcome)
    return Search(
        topology,
        unit,
        gpu.usable,
        outcomes,
        len(everything),
        refused,
        too_large,
        untried,
        list(told),
    )


def _axes(configured: Configured, mesh_devices: Sequence[Any]) -> list[str]:
    """Returns the further axes of the mesh that a recipe's model and plans can take."""

    def takes(axis: str) -> bool:
        try:
            sizes: dict[str, Any] = {axis: 2}
            mesh = meshes.make_mesh(devices=mesh_devices, **sizes)
            with warnings.catch_warnings(action="ignore"):  # of its bubble
                make_job(configured, mesh.abstract_mesh).abstract_state()
        except UserError:
            return False
        return True

    return [axis for axis in meshes.AXES[2:] if takes(axis)]


def _trace(
    recipe: Recipe, topology: str, settings: dict[str, Any]
) -> tuple[Activity, list[str]]:
    """Returns a step's activity, and the names of its activations.

    Errors and warnings are left to the candidates' own traces.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            configured = configure(recipe, make_config(recipe, settings))
            program = trace(configured, topology)
    except Exception:
        return Activity(0.0, 0.0, 0.0), []
    return activity(program), sorted({*names_in(program.jaxpr)})


def _estimates(
    recipe: Recipe,
    mesh_devices: Sequence[Any],
    gpu: GPU,
    traced: Callable[[str], tuple[Activity, list[str]]],
    everything: Iterable[Candidate],
    overrides: Mapping[str, Any],
) -> tuple[
    dict[Candidate, Estimate],
    list[tuple[Candidate, str]],
    list[tuple[Candidate, int]],
]:
    """Estimates what may fit; lists invalid candidates and those that are too large."""
    promising: dict[Candidate, Estimate] = {}
    refused, too_large = [], []
    sizes: dict[frozenset, StateSize] = {}  # by the settings that the state depends on
    for candidate in everything:
        given = {**overrides, **candidate.settings}
        key = frozenset((k, str(given[k])) for k in given.keys() - _NOT_OF_STATE)
        try:
            configured = configure(recipe, make_config(recipe, given))
            settings, policy = configured.settings, configured.policy
            mesh = make_mesh(settings.mesh, mesh_devices)
            policy.check_groups(meshes.shards_of(mesh, split=True))
            check_batch_size(settings.batch_size, policy.accumulate, mesh)
            if key not in sizes:
                job = make_job(configured, mesh.abstract_mesh)
                sizes[key] = state_size(job.abstract_state())
        except UserError as error:
            refused.append((candidate, str(error)))
            continue
        size = of_stage(sizes[key], meshes.stages_of(mesh))
        bound = memory_bound(size, policy)
        if bound > gpu.usable:
            too_large.append((candidate, bound))
            continue
        active, _ = traced(settings.policy.remat)
        inputs = traced("full")[0].saved if meshes.TENSOR in mesh.shape else 0.0
        examples = settings.batch_size / mesh.size
        promising[candidate] = estimate(
            size, policy, mesh, gpu, active, examples, inputs
        )
    return promising, refused, too_large
