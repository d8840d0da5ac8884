"""Stage plan: what the planner says of each job, beside what was measured.

Plans are made on the CPU, as without a GPU; profiles on the GPU.
"""

import collections
import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from jshard.plan.cost.timeline import replay
from jshard.plan.fit.hardware import STATED, Constants, find_constants
from jshard.plan.planning import Plan, make_plan
from jshard.plan.program import trace
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from kit.jobs import Job, gpt2, llamas
from kit.results import Recorder
from kit.running import Part
from kit.training import opened

PROFILED = 3  # steps
TOP = 10  # kernels


def parts(card: str | None) -> list[Part]:
    """A plan and a profile of each job; the profiles of the targets first."""
    jobs = {"gpt2": [gpt2(card)], "llama": llamas(card)}
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    pairs = [(stage, job) for stage, found in jobs.items() for job in found]
    plans = [
        Part(
            f"plan {job.name}",
            partial(compare, job=job, stage=stage, card=card),
            180,
            on_cpu,
        )
        for stage, job in pairs
    ]
    profiles = [
        Part(f"profile {job.name}", partial(profile, job=job), 120) for _, job in pairs
    ]
    return [part for both in zip(plans, profiles, strict=True) for part in both]


def compare(record: Recorder, *, job: Job, stage: str, card: str | None) -> None:
    """Plans a job with the planner's constants and others, and compares.

    "published" are the planner's own, fitted to published runs; "fitted" are those of
    this card, if the stage "kernels" has run.
    """
    plan = plan_job(job, card)
    measured = _measured(record.of(stage), job.name)
    seconds, peak = measured.get("step_seconds"), measured.get("peak_bytes")
    path = record.out / "constants.json"
    names = ("stated", "published", "fitted")
    times: dict[str, float | None] = dict.fromkeys(names)
    if plan.timeline is not None:
        times["stated"] = seconds_with(plan, STATED)
        times["published"] = plan.timeline.seconds
        if path.exists():
            times["fitted"] = seconds_with(plan, find_constants(path))
    record(
        job.name,
        planned_seconds=times,
        measured_seconds=seconds,
        error_per_cent={name: _off(time, seconds) for name, time in times.items()},
        planned_bytes=plan.memory.total,
        measured_bytes=peak,
        memory_error_per_cent=_off(plan.memory.total, peak),
        fits=plan.fits,
    )


def plan_job(job: Job, card: str | None) -> Plan:
    """The plan for one GPU of this kind, which need not be there."""
    topology = f"{card}:1" if card else "attached"
    with open_recipe(find_recipe(job.recipe)) as recipe:
        configured = configure(recipe, job.config(recipe))
        return make_plan(trace(configured, topology))


def seconds_with(plan: Plan, constants: Constants) -> float:
    """A step of the same program with other constants."""
    assert plan.gpu is not None
    gpu = dataclasses.replace(plan.gpu, constants=constants)
    return replay(plan.module, gpu, plan.devices).seconds


def _measured(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What a stage's parts have of a job, if it ran."""
    return next(
        (
            results[name]
            for results in found.values()
            if "step_seconds" in results.get(name, {})
        ),
        {},
    )


def _off(planned: float | None, measured: float | None) -> float | None:
    return 100 * (planned / measured - 1) if planned and measured else None


def profile(record: Recorder, *, job: Job) -> None:
    """The kernels of a step that take longest, and what the planner says of each.

    The planner replays the very program that runs, so that its kernels have the
    profile's names.
    """
    with opened(job, 1) as (_, config, program, read):
        made = program.job
        plan = make_plan(program)
        state = made.fsdp.init(made.make_model, made.optimizer, seed=config.seed)
        batch = next(read)
        state, metrics = made.train_step(state, batch)  # compiles
        jax.block_until_ready((state, metrics))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(PROFILED):
                    state, metrics = made.train_step(state, batch)
                jax.block_until_ready((state, metrics))
            (file,) = Path(folder).rglob("*.xplane.pb")
            ran = kernels(ProfileData.from_file(str(file)))
    planned = collections.defaultdict(float)
    for event in plan.timeline.events if plan.timeline else ():
        planned[event.name] += event.seconds
    assert ran, "the profile has no kernels"
    longest = sorted(ran, key=lambda name: -ran[name][0])[:TOP]
    record(
        job.name,
        kernel_seconds=sum(seconds for seconds, _ in ran.values()),
        planned_seconds=sum(planned.values()) or None,
        without_plan=sum(s for name, (s, _) in ran.items() if name not in planned),
        longest=[
            {
                "operation": name,
                "kernel": ran[name][1],
                "seconds": ran[name][0],
                "planned": planned.get(name),
            }
            for name in longest
        ],
    )


def kernels(found: ProfileData) -> dict[str, tuple[float, str]]:
    """Of each HLO operation: seconds a step on one device, and the kernel's name.

    A kernel of a GPU without an operation counts under its own name.
    """
    total: dict[str, float] = collections.defaultdict(float)
    names: dict[str, str] = {}
    devices = set()
    for plane in found.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_gpu and "Stream" not in line.name:
                continue  # lines that sum others up
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation is None and not on_gpu:
                    continue
                operation = operation or event.name
                devices.add(plane.name)
                total[operation] += event.duration_ns * 1e-9
                names[operation] = event.name
    steps = PROFILED * max(1, len(devices))
    return {name: (seconds / steps, names[name]) for name, seconds in total.items()}
