"""Searches the ways to run a job for those that no other beats.

All combinations of what may vary are listed. Invalid ones are refused, and those whose
memory cannot fit are ruled out by arithmetic (``plan.search.estimates``). The others
are compiled in worker processes, and their schedules replayed, in the order of
``plan.search.acquisition``, up to a limit.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.errors import UserError
from jshard.mesh import FSDP
from jshard.plan.constants import find_constants
from jshard.plan.program import check_batch_size
from jshard.plan.search import estimates
from jshard.plan.search.acquisition import Choice
from jshard.plan.search.cache import default_folder
from jshard.plan.search.candidates import REMAT, RESHARD, Candidate, candidates
from jshard.plan.search.estimates import Activity, Estimate
from jshard.plan.search.results import Outcome, Search
from jshard.plan.search.workers import Workers
from jshard.plan.topology import GPU, devices, parse
from jshard.training.config.command_line import override
from jshard.training.config.policy import make_policy
from jshard.training.job import make_job, make_mesh
from jshard.training.make_config import make_config
from jshard.training.recipe import Recipe, open_recipe

TIMEOUT = 600.0  # seconds to compile a candidate
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
    overrides: Mapping[str, str],
    topology: str,
    allowed: Mapping[str, Sequence[str] | None],
    *,
    limit: int = 50,
    constants: str = "fitted",
    report: Callable[[int, int, Outcome], None] = lambda *_: None,
) -> Search:
    """Compiles the promising ways to run a recipe's job on a topology.

    Args:
      path: of the recipe, for ``open_recipe``.
      overrides: the user's settings, text by key, which stay fixed.
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
    with (
        open_recipe(path) as recipe,
        _workers(path, topology, constants) as workers,
    ):
        config = make_config(recipe, dict(overrides))
        for key, values in allowed.items():
            for value in values or ():  # a bad value is an error, not a candidate
                override(make_config(recipe, {}), {key: value}, recipe.name)

        traces, given = _Traces(), str(config.policy.remat)
        traces.add(workers, overrides, [given])
        if REMAT in allowed:
            only = {REMAT: allowed[REMAT]}
            tried = candidates(config, number, only, traces.names)
            remats = [c.settings[REMAT] for c in tried if REMAT in c.settings]
            traces.add(workers, overrides, [r for r in remats if r != given])

        everything = candidates(config, number, allowed, traces.names)
        promising, refused, too_large = _estimates(
            recipe, mesh_devices, gpu, traces, everything, overrides
        )
        choice = Choice(promising, gpu.usable)
        folder = str(default_folder())
        tasks = (
            {"settings": {**overrides, **candidate.settings}, "cache": folder}
            for candidate in choice.first(limit)
        )
        outcomes, unit, warnings = [], "tokens", dict.fromkeys(traces.warnings)
        for done, (index, reply) in enumerate(workers.run(tasks), start=1):
            outcome = Outcome(
                choice.chosen[index],
                usable=gpu.usable,
                error=reply.get("error", ""),
                **reply.get("figures", {}),
            )
            unit = reply.get("unit", unit)
            warnings |= dict.fromkeys(reply.get("warnings", ()))
            if reply.get("refused"):
                refused.append((outcome.candidate, outcome.error))
            else:
                outcomes.append(outcome)
            choice.learn(outcome)
            report(done, min(limit, len(promising)), outcome)
    return Search(
        topology,
        unit,
        gpu.usable,
        outcomes,
        len(everything),
        refused,
        too_large,
        choice.left,
        list(warnings),
    )


def _workers(*arguments: str | Path) -> Workers:
    command = [sys.executable, "-m", "jshard.plan.search.worker", *map(str, arguments)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    processes = os.cpu_count() or 1
    return Workers(
        command, processes=processes, timeout=TIMEOUT, environment=environment
    )


class _Traces:
    """Results of tracing with several remat policies.

    Attributes:
      activities: by remat policy.
      names: of activations.
      warnings: from the traces.
    """

    def __init__(self):
        self.activities: dict[str, Activity] = {}
        self.names: list[str] = []
        self.warnings: list[str] = []

    def add(
        self, workers: Workers, overrides: Mapping[str, str], remats: Sequence[str]
    ) -> None:
        """Traces with remat policies. Errors are left to the candidates' own traces."""
        tasks = [{"settings": {**overrides, REMAT: remat}} for remat in remats]
        for index, reply in workers.run(tasks):
            self.warnings += reply.get("warnings", ())
            if "activity" in reply:
                self.activities[remats[index]] = Activity(**reply["activity"])
                self.names = self.names or reply["names"]

    def activity(self, remat: str) -> Activity:
        """Returns the activity of a remat policy, or if unknown, that of another."""
        others = [*self.activities.values(), Activity(0.0, 0.0, 0.0)]
        return self.activities.get(remat, others[0])


def _estimates(
    recipe: Recipe,
    mesh_devices: Sequence[Any],
    gpu: GPU,
    traces: _Traces,
    everything: Iterable[Candidate],
    overrides: Mapping[str, str],
) -> tuple[
    dict[Candidate, Estimate],
    list[tuple[Candidate, str]],
    list[tuple[Candidate, int]],
]:
    """Estimates what may fit; lists invalid candidates and those that are too large."""
    promising: dict[Candidate, Estimate] = {}
    refused, too_large = [], []
    sizes: dict[
        tuple, estimates.StateSize
    ] = {}  # by the settings that the state depends on
    for candidate in everything:
        settings = {**overrides, **candidate.settings}
        key = tuple(sorted((k, settings[k]) for k in settings.keys() - _NOT_OF_STATE))
        try:
            config = make_config(recipe, settings)
            policy, mesh = make_policy(config), make_mesh(config, mesh_devices)
            policy.check_groups(mesh.shape[FSDP])
            check_batch_size(config, mesh)
            if key not in sizes:
                job = make_job(recipe, config, mesh.abstract_mesh)
                sizes[key] = estimates.state_size(job.abstract_state())
        except UserError as error:
            refused.append((candidate, str(error)))
            continue
        bound = estimates.memory_bound(sizes[key], policy)
        if bound > gpu.usable:
            too_large.append((candidate, bound))
            continue
        activity = traces.activity(str(config.policy.remat))
        examples = config.batch_size // mesh.size
        promising[candidate] = estimates.estimate(
            sizes[key], policy, mesh, gpu, activity, examples
        )
    return promising, refused, too_large
