"""A plan: the memory, traffic and time of a step, from its compiled program alone."""

import collections
import dataclasses
import time
from typing import Any

import jax

from jshard.plan import hlo
from jshard.plan.cost.kernel_work import FLOAT8, FLOAT32, MATRIX, MXFP8, NVFP4
from jshard.plan.cost.ticks import Pipeline, pipeline_of
from jshard.plan.cost.timeline import Timeline, replay
from jshard.plan.cost.traffic import Traffic, count, least
from jshard.plan.fit.device_memory import usable_bytes
from jshard.plan.fit.hardware import FITTED, GPU, Constants, short_name
from jshard.plan.fit.memory_choice import Candidate, Traced, check_stages, fit
from jshard.plan.memory import buffer_assignment
from jshard.plan.memory.breakdown import Memory, memory
from jshard.plan.program import ATTACHED, Program, trace
from jshard.plan.start_up import has_experts, network_axes
from jshard.plan.topology import devices, parse
from jshard.recipe.build import make_mesh
from jshard.recipe.configured import Configured
from jshard.sharding.settings.mesh import groups_of_examples, hosts_of, platform
from jshard.system.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a program before it runs.

    Attributes:
      name: of what is planned.
      about: what it is made for, in words.
      topology: the devices, "h100:64" or "attached".
      gpu: their card; None for devices that are not in ``GPUS``.
      devices: how many.
      device_kind: the name of one.
      text: the compiled program, in the order in which it runs.
      module: the same, parsed.
      memory: of a device, by part.
      traffic: the collectives of a step.
      timeline: when everything runs; None if the card is unknown (a CPU).
      options: XLA's.
      notes: what this plan does not know, in words.
      pipeline: what its stages do; None without a mesh.pipe.
    """

    name: str
    about: str
    topology: str
    gpu: GPU | None
    devices: int
    device_kind: str
    text: str
    module: hlo.Module
    memory: Memory
    traffic: Traffic
    timeline: Timeline | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pipeline: Pipeline | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the step fits the card; None without a card."""
        return self.memory.fits

    @property
    def has_experts(self) -> bool:
        """Whether devices send each other tokens for experts."""
        return False

    @property
    def kind(self) -> str:
        """What runs must have been to confirm this step: "float8 on H100"."""
        if self.gpu is None or self.timeline is None:
            return ""
        return kind_of_step(self.timeline, self.gpu, self.has_experts)

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """Between what a step may take; None if no run confirms steps of its kind."""
        if self.gpu is None or self.timeline is None:
            return None
        return self.gpu.constants.range_of(self.timeline.seconds, self.kind)

    @property
    def items_per_second(self) -> float | None:
        """Tokens (or examples) per second on all devices; None if it is no recipe's."""
        return None

    @property
    def unit(self) -> str:
        """What these are: "tokens" or "examples"."""
        return ""

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, if the model's FLOPs are known."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipePlan(Plan):
    """What is known of a job before it runs.

    Attributes:
      program: the traced step.
      seconds: time that compiling took.
      chosen: what was chosen of the config by its memory, and why; empty if nothing.
    """

    program: Program
    seconds: float
    chosen: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether devices send each other tokens for experts."""
        return has_experts(self.program.jaxpr)

    @property
    def items_per_second(self) -> float | None:
        """Tokens (or examples) per second on all devices."""
        return self.timeline and self.program.items / self.timeline.seconds

    @property
    def unit(self) -> str:
        """What these are: "tokens" or "examples"."""
        return self.program.unit

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (``Program.mfu``)."""
        return self.timeline and self.program.mfu(self.timeline.seconds)


def kind_of_step(timeline: Timeline, gpu: GPU, experts: bool) -> str:
    """Returns what runs must have been to confirm a step: "float8 on H100"."""
    flops: dict[str, float] = collections.defaultdict(float)
    for event in timeline.events:
        flops[event.kind] += event.flops
    dtype = "float32" if flops[FLOAT32] > flops[MATRIX] else "bf16"
    dtype = "float8" if flops[FLOAT8] else dtype
    dtype = "mxfp8" if flops[MXFP8] else dtype
    dtype = "nvfp4" if flops[NVFP4] else dtype
    dtype = dtype if sum(flops.values()) else "no products"
    with_experts = " with experts" if experts else ""
    own = f", as {gpu.source} has it" if gpu.source else ""
    return f"{dtype}{with_experts} on {short_name(gpu.name)}{own}"


def plan_recipe(
    configured: Configured,
    topology: str,
    constants: Constants = FITTED,
    imbalance: float = 1.0,
) -> RecipePlan:
    """Plans a recipe as training would run it on the devices of a topology.

    What the config leaves open ("fit") is chosen as training chooses it, for the memory
    of these devices.

    Args:
      configured: what to train, as `jshard.recipe.configure` returns it.
      topology: "h100:64", or "attached" for this machine's devices.
      constants: of the cost model.
      imbalance: the most tokens that a device sends to one expert, as a multiple of an
        even share.

    Raises:
      DoesNotFit: something is open, and no choice fits.
      UserError: the topology is unknown, or the config is invalid for it; `imbalance`
        is given, and there are no experts.
    """
    absent = topology != ATTACHED
    there = devices(topology) if absent else jax.devices()

    def traced(configured: Configured) -> Program:
        return trace(configured, topology, constants)

    def to_fit(candidate: Candidate) -> Traced:
        program = traced(candidate.apply(configured))
        sizes, of_host = program.mesh.shape, hosts_of(list(program.mesh.devices.flat))
        network = network_axes(program.mesh, of_host)
        micro = candidate.accumulate
        return Traced(program.jaxpr, program.state, micro, dict(sizes), network)

    def planned(candidate: Candidate) -> tuple[int, RecipePlan]:
        plan = make_plan(traced(candidate.apply(configured)), imbalance)
        return plan.memory.total, plan

    settings = configured.settings
    if not settings.policy.open_keys:
        return make_plan(traced(configured), imbalance)
    mesh = make_mesh(settings.mesh, there)
    check_stages(settings, mesh)
    usable = parse(topology)[0].usable if absent else usable_bytes(there)
    found = fit(settings, groups_of_examples(mesh), usable, to_fit, planned)
    return dataclasses.replace(found.made, chosen=found.note)


def make_plan(program: Program, imbalance: float = 1.0) -> RecipePlan:
    """Compiles a program, and derives memory, traffic and timeline from it.

    Raises:
      UserError: as of ``plan_recipe``.
    """
    if imbalance > 1 and not has_experts(program.jaxpr):
        raise UserError(
            f"--imbalance={imbalance:g}: the step has no experts that take rounds of "
            "tokens; leave it out"
        )
    policy, mesh, gpu = program.job.fsdp.policy, program.mesh, program.gpu
    state, start = program.state, time.perf_counter()
    with buffer_assignment.dump_folder() as folder:
        compiled = program.compile(**buffer_assignment.dump_options(folder))
        seconds = time.perf_counter() - start
        needed = memory(policy, state, compiled, folder, devices=mesh.size, gpu=gpu)
    text = compiled.as_text() or ""
    module = dataclasses.replace(hlo.parse(text), imbalance=imbalance)
    pipeline = pipeline_of(module, mesh, policy)
    timeline = None if gpu is None else replay(module, gpu, mesh.size, pipeline)
    prefetch = platform(program.job.fsdp.mesh) == "gpu"
    lowest = least(program.job.fsdp.mesh, policy, state, prefetch=prefetch)
    stage = 0 if timeline is None else timeline.stage
    traffic = Traffic(count(module, mesh.size, gpu, pipeline, stage), lowest)
    return RecipePlan(
        name=program.recipe.name,
        about=_about(program, seconds),
        topology=program.topology,
        gpu=gpu,
        devices=mesh.size,
        device_kind=gpu.name if gpu else mesh.devices.flat[0].device_kind,
        text=text,
        module=module,
        memory=needed,
        traffic=traffic,
        timeline=timeline,
        options=program.options,
        pipeline=pipeline,
        program=program,
        seconds=seconds,
    )


def _about(program: Program, seconds: float) -> str:
    """Returns mesh, batch, and the time that compiling took."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items())
    size = program.job.configured.settings.batch_size
    batch = f"batch {size}: {program.items:,} {program.unit}"
    return f"{mesh}; {batch} per step; compiled in {seconds:.1f} s"
