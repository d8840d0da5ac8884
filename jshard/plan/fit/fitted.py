"""The job of a run, with the keys chosen that its config leaves to the memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.plan.fit.device_memory import compiled_bytes, usable_bytes
from jshard.plan.fit.memory_choice import Candidate, Traced, check_stages, fit
from jshard.plan.start_up import network_axes
from jshard.recipe.build import Job, abstract_batch, make_job
from jshard.recipe.changes import FITTED_ON, changed_keys, read_config
from jshard.recipe.config.run_config import flatten, is_within
from jshard.recipe.config.shared_keys import FITTED
from jshard.recipe.configured import Configured
from jshard.sharding.settings.mesh import groups_of_examples, hosts_of, mesh_text
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers

# Keys and groups on which a step's memory depends.
_OF_STEP = (
    "model", "batch_size", "policy", "optimizer", "compiler_options", "deterministic",
)  # fmt: skip


def make_fitted_job(
    configured: Configured,
    mesh: Mesh,
    hosts: Sequence[int] | None,
    workdir: Path,
    peers: Peers,
) -> tuple[Job, str]:
    """Sets up a recipe on a mesh; what the config leaves open is chosen.

    A run that resumes keeps its choice, and so its program, on the same mesh.

    All processes call it.

    Returns:
      The job, whose config has no open keys, and a line that says what was chosen and
      why; empty if nothing was open.

    Raises:
      UserError: The config asks for something impossible, or nothing fits.
    """
    settings = configured.settings
    if not settings.policy.open_keys:
        return make_job(configured, mesh), ""
    check_stages(settings, mesh)
    kept = None
    if peers.index == 0:
        kept = _choice_of_run(workdir, configured, mesh)
    kept = json.loads(peers.publish("fit", json.dumps(kept)))
    if kept is not None:
        candidate = Candidate(*kept)
        return (
            make_job(candidate.apply(configured), mesh),
            f"{candidate}, as this run chose when it began",
        )
    peers.at("choosing by memory", 0)
    batch, _, _ = abstract_batch(configured, mesh)
    network = network_axes(mesh, hosts_of(list(mesh.devices.flat), hosts))

    def traced(job: Job) -> tuple[Any, jax.stages.Traced]:
        state = job.abstract_state()
        return state, job.train_step.trace(state, batch)

    def trace(candidate: Candidate) -> Traced:
        state, step = traced(make_job(candidate.apply(configured), mesh))
        return Traced(
            step.jaxpr.jaxpr,
            state,
            candidate.accumulate,
            dict(mesh.shape),
            network,
        )

    def compile(candidate: Candidate) -> tuple[int, Job]:
        # Its step keeps what is compiled here.
        job = make_job(candidate.apply(configured), mesh)
        return compiled_bytes(traced(job)[1].lower().compile()), job

    usable = min(map(int, peers.share("memory", str(usable_bytes(mesh.local_devices)))))
    parts = groups_of_examples(mesh)
    chosen = fit(settings, parts, usable, trace, compile)
    return chosen.made, chosen.note


def fitted_on(mesh: Mesh) -> str:
    """Returns what a choice was made for: the devices and the mesh, in words."""
    kind = mesh.devices.flat[0].device_kind
    return f"{mesh.size} x {kind}: {mesh_text(mesh)}"


def _choice_of_run(
    workdir: Path, configured: Configured, mesh: Mesh
) -> tuple[str, int] | None:
    """Returns what the folder's run chose, if it holds for this config and mesh."""
    try:
        before = read_config(workdir)
    except UserError:  # a new run; one that cannot be resumed is refused later
        return None
    if before.get(FITTED_ON) != fitted_on(mesh):
        return None
    changes = changed_keys(before, configured.recorded)
    chosen = configured.settings.policy.open_keys
    if any(is_within(key, _OF_STEP) and key not in chosen for key in changes):
        return None
    remat, accumulate = (flatten(before).get(key) for key in FITTED)
    if not isinstance(remat, str) or not isinstance(accumulate, int):
        return None  # nothing that a run wrote
    return remat, accumulate
