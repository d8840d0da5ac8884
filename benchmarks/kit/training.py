"""Stages gpt2 and llama: training jobs as ``jshard.train`` runs them, timed."""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jshard.data.batches import batches
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import peak_flops
from jshard.plan.program import Program, trace
from jshard.recipe.configured import configure
from jshard.recipe.definition import Recipe
from jshard.recipe.load import find_recipe, open_recipe
from kit.jobs import Job, gpt2, llamas
from kit.results import Recorder
from kit.running import Part

WARM_UP, STEPS = 3, 10


class Opened(NamedTuple):
    """A recipe, its config, the traced step, and batches on the devices."""

    recipe: Recipe
    config: Any
    program: Program
    batches: Iterator[Any]


def gpt2_parts(card: str | None) -> list[Part]:
    """GPT-2: by the command line, and step by step."""
    job, steps = gpt2(card), 200 if card else 4
    return [
        Part("steps", partial(measure, job=job), 240, _cache(card)),
        Part("train", partial(train, job=job, steps=steps), 450, _cache(card)),
    ]


def llama_parts(card: str | None) -> list[Part]:
    """A part for each job."""
    return [
        Part(job.name, partial(measure, job=job), 180, _cache(card))
        for job in llamas(card)
    ]


def _cache(card: str | None) -> dict[str, str | None]:
    """Programs for a GPU that one part compiled are not compiled again by the next."""
    if card is None:
        return {}
    folder = Path(tempfile.gettempdir()) / "jshard-gpu"
    return {"JAX_COMPILATION_CACHE_DIR": str(folder)}


def train(record: Recorder, *, job: Job, steps: int) -> None:
    """Trains with the command line on text that is there; reads its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--config={job.recipe}", f"--workdir={folder}/run"]
        words += ["--config.checkpoint.every=0", "--config.eval_every=0"]
        words += [f"--config.{name}={value}" for name, value in job.changes.items()]
        words += [f"--config.steps={steps}"]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "jshard.train", *words], check=True)
        took = time.perf_counter() - start
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    speeds = [x["tokens_per_second"] for x in lines if "tokens_per_second" in x]
    record(
        job.name,
        seconds=took,
        steps=steps,
        time_to_first_step=lines[0]["time_to_first_step"],
        losses={x["step"]: x["loss"] for x in lines if "loss" in x},
        tokens_per_second=statistics.median(speeds),
    )


@contextlib.contextmanager
def opened(job: Job, steps: int) -> Iterator[Opened]:
    """A job on the devices at hand, and its first batches."""
    with open_recipe(find_recipe(job.recipe)) as recipe:
        config = job.config(recipe)
        program = trace(configure(recipe, config), "attached")
        shard_batch = program.job.fsdp.shard_batch
        read = batches(
            recipe.make_data(config, "train"),
            batch_size=config.batch_size,
            start_step=0,
            num_steps=steps,
        )
        yield Opened(recipe, config, program, map(shard_batch, read))


def measure(record: Recorder, *, job: Job) -> None:
    """Times the steps of a job on the devices at hand."""
    with opened(job, 2) as (recipe, config, program, read):
        made = program.job
        planned = compiled_bytes(program.compile())
        state = made.fsdp.init(made.make_model, made.optimizer, seed=config.seed)
        jax.block_until_ready(state)
        before = peak_bytes()
        given = itertools.cycle(list(read))
        losses = []
        for _ in range(WARM_UP):
            state, metrics = made.train_step(state, next(given))
            losses.append(float(metrics["loss"]))
        alone, python = [], []
        for _ in range(STEPS):
            start = time.perf_counter()
            state, metrics = made.train_step(state, next(given))
            python.append(time.perf_counter() - start)
            jax.block_until_ready((state, metrics))
            alone.append(time.perf_counter() - start)
            losses.append(float(metrics["loss"]))
        start = time.perf_counter()
        for _ in range(STEPS):
            state, metrics = made.train_step(state, next(given))
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - start) / STEPS
        losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
        record(
            job.name,
            step_seconds=seconds,
            **_rates(recipe, config, program, seconds),
            steps_alone=_spread(alone),
            python_seconds=statistics.median(python),
            peak_bytes=peak_bytes(),
            peak_bytes_before_steps=before,
            compiled_bytes=planned,
            losses=losses,
        )


def _rates(
    recipe: Recipe, config: Any, program: Program, seconds: float
) -> dict[str, float | None]:
    per_second = program.items / seconds
    peak = peak_flops(jax.devices()[0].device_kind)
    flops = recipe.flops_per_token and recipe.flops_per_token(config)
    count = program.mesh.size
    mfu = flops * per_second / (peak * count) if flops and peak else None
    return {"tokens_per_second": per_second, "mfu": mfu}


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "least": min(seconds),
        "median": statistics.median(seconds),
        "most": max(seconds),
    }


def peak_bytes() -> int | None:
    """Of the fullest device; XLA does not count on CPUs."""
    counted = [device.memory_stats() for device in jax.local_devices()]
    return max((x["peak_bytes_in_use"] for x in counted if x), default=None)
