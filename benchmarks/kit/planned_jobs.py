"""Stage plan: what the planner says of each job, beside what was measured.

Plans are made on the CPU, as without a GPU; profiles on the GPU.
"""

import dataclasses
import json
import tempfile
from functools import partial
from typing import Any

import jax

import jshard.plan
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.hardware import STATED, Constants, find_constants
from jshard.plan.output import comparison_text
from jshard.plan.planning import Plan, make_plan
from jshard.plan.program import trace
from jshard.plan.trace.constants_fit import fit_constants
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from kit.jobs import Job, gpt2, llamas
from kit.results import Recorder
from kit.running import Part
from kit.training import opened

PROFILED = 3  # steps


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
    # Kernels in command buffers have no names of instructions.
    named = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    profiles = [
        Part(f"profile {job.name}", partial(profile, job=job), 180, named)
        for _, job in pairs
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
    """Where a step deviates from the plan of the very program that runs.

    Also writes the comparison, and the constants that the profile shows.
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
            found = jshard.plan.compare(plan, folder)
    data = comparison_text.as_json(found)
    (record.out / f"profile-{job.name}.json").write_text(json.dumps(data, indent=1))
    fitted = {}
    if plan.timeline is not None:
        fitted = fit_constants(plan, found).as_json()
        constants = record.out / f"constants-{job.name}.json"
        constants.write_text(json.dumps(fitted, indent=1))
    record(
        job.name,
        measured_seconds=found.step_seconds,
        planned_seconds=found.planned,
        first=comparison_text.first(found),
        causes=found.sums,
        fitted=fitted,
    )
