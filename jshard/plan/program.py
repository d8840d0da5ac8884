"""The program that training would run: traced and compiled, not run."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from jshard.plan.fit.hardware import FITTED, GPU, GPUS, Constants
from jshard.plan.topology import compile_for, devices, parse, tracing_for
from jshard.recipe.build import Job, abstract_batch, make_job, make_mesh
from jshard.recipe.configured import Configured
from jshard.recipe.definition import Recipe
from jshard.sharding.layout.batch import divisor_of_examples, nearest
from jshard.sharding.settings.mesh import (
    devices_of_a_sequence,
    groups_of_examples,
    named_sizes,
)
from jshard.sharding.settings.state import TrainState, in_one_line
from jshard.sharding.step.checks import check_precisions
from jshard.system.errors import UserError

ATTACHED = "attached"


@dataclasses.dataclass(frozen=True)
class Program:
    """A train step, traced for the devices of a topology."""

    job: Job  # what is trained; its mesh is abstract if the devices are absent
    mesh: Mesh  # of the devices
    topology: str  # as given, "h100:64" or "attached"
    gpu: GPU | None  # None for devices that are not in `GPUS`
    state: TrainState  # abstract, with shardings
    traced: jax.stages.Traced  # the train step of the state and a batch
    items: int  # tokens (or examples) in a batch
    unit: str  # "tokens" or "examples"

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        return self.job.configured.recipe

    @property
    def jaxpr(self) -> core.Jaxpr:
        """Of the train step."""
        return self.traced.jaxpr.jaxpr

    @property
    def options(self) -> dict[str, Any]:
        """XLA's options."""
        return self.job.fsdp.compiler_options

    def compile(self, **further: Any) -> jax.stages.Compiled:
        """Compiles it for its devices, with further options of XLA."""
        options = self.options | further
        if self.topology == ATTACHED:
            with in_one_line():
                return self.traced.lower().compile(options)
        return compile_for(self.mesh, self.traced, options)

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step, against all devices' dense bf16 peak.

        None if the card, the recipe's FLOPs or the number of tokens is unknown.
        """
        flops_per_token = self.recipe.flops_per_token
        if self.gpu is None or flops_per_token is None or self.unit != "tokens":
            return None
        needed = flops_per_token(self.job.configured.config) * self.items / seconds
        return needed / (self.gpu.flops * self.mesh.size)


def trace(
    configured: Configured, topology: str, constants: Constants = FITTED
) -> Program:
    """Traces a recipe's step as training would; arguments as of ``plan_recipe``.

    Raises:
      UserError: the topology is unknown, or the config is invalid for it.
    """
    absent, gpu = topology != ATTACHED, find_gpu(topology)
    if gpu is not None:
        gpu = dataclasses.replace(gpu, constants=constants)
    settings, policy = configured.settings, configured.policy
    mesh = make_mesh(settings.mesh, devices(topology) if absent else jax.devices())
    check_batch_size(settings.batch_size, policy.accumulate, mesh)
    # Absent devices have no memory kinds; an abstract mesh allows arrays on the host.
    on = mesh.abstract_mesh if absent else mesh
    job = make_job(configured, on, policy)
    check_precisions(job.fsdp.policy, mesh)  # of which an abstract mesh knows no GPU
    with tracing_for(gpu) if gpu and absent else nullcontext():
        state = job.abstract_state()
        batch, items, unit = abstract_batch(configured, on)
        traced = job.train_step.trace(state, batch)
    return Program(job, mesh, topology, gpu, state, traced, items, unit)


def find_gpu(topology: str) -> GPU | None:
    """Returns the card of a topology; None for devices that are not in ``GPUS``."""
    if topology != ATTACHED:
        return parse(topology)[0]
    kind = jax.devices()[0].device_kind
    return next((gpu for gpu in GPUS.values() if gpu.name == kind), None)


def check_batch_size(size: int, micro: int, mesh: Mesh) -> None:
    """Raises UserError unless devices and micro-batches divide the batch."""
    groups, divisor = groups_of_examples(mesh), divisor_of_examples(mesh, micro)
    if size % divisor:
        who = f"{mesh.size} devices of the mesh"
        if axes := devices_of_a_sequence(mesh):
            who = f"{groups} groups of {named_sizes(axes)} devices"
        times = f" times {micro} micro-batches" if micro > 1 else ""
        raise UserError(
            f"--config.batch_size={size}: must be a multiple of the "
            f"{who}{times}; use {nearest(size, divisor)}"
        )
