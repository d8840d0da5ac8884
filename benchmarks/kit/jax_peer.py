"""A worker of stage peers: a job trained by jshard, or by JAX with GSPMD's annotations.

    python -m kit.jax_peer jshard '{"name": "x", "recipe": "gpt.py", "changes": {}}'

What it prints and reads is in kit/turns.py.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

import compiling
import gspmd
from jshard.plan import tracing_for
from jshard.plan.topology import devices, parse
from jshard.recipe.build import make_job, make_mesh
from jshard.recipe.configured import configure
from jshard.recipe.definition import Recipe
from jshard.recipe.load import find_recipe, open_recipe
from jshard.sharding.settings.mesh import BATCH
from kit.jobs import Job
from kit.training import peak_bytes
from kit.turns import WARM_UP, open_answers, random_batch, take_turns


class Program(NamedTuple):
    """A traced step ``state, metrics = step(state, batch)``.

    Attributes:
      traced: the step.
      options: of XLA, besides those of the step's ``jit``.
      init: makes the state.
      loss: reads it from the metrics.
    """

    traced: jax.stages.Traced
    options: dict[str, Any]
    init: Callable[[], Any]
    loss: Callable[[Any], jax.Array]


def main() -> None:
    """Trains as it is told."""
    answer = open_answers()
    system, text = sys.argv[1:]
    job = Job(**json.loads(text))
    with open_recipe(find_recipe(job.recipe)) as recipe:
        config = job.config(recipe)
        mesh = make_mesh(configure(recipe, config).settings.mesh)
        start = time.perf_counter()
        program = SYSTEMS[system](recipe, config, mesh)
        step = program.traced.lower().compile(program.options)
        compile_seconds = time.perf_counter() - start
        state = program.init()
    batch = random_batch(config.model, config.batch_size)
    batch = jax.device_put(batch, NamedSharding(mesh, BATCH))

    def run(steps: int) -> tuple[list[float], list[float]]:
        nonlocal state
        ends, losses = [time.perf_counter()], []
        for _ in range(steps):  # one is under way when the one before it ends
            state, metrics = step(state, batch)
            losses.append(program.loss(metrics))
            if len(losses) > 1:
                losses[-2].block_until_ready()
                ends.append(time.perf_counter())
        jax.block_until_ready((state, losses))
        ends.append(time.perf_counter())
        return np.diff(ends).tolist(), [float(loss) for loss in losses]

    seconds, losses = run(WARM_UP)
    answer(ready=seconds[-1], compile_seconds=compile_seconds, losses=losses)
    take_turns(answer, run, peak_bytes)


def jshard_program(recipe: Recipe, config: ConfigDict, mesh: Mesh) -> Program:
    """As ``jshard.train`` has it."""
    made = make_job(configure(recipe, config), mesh)
    return Program(
        made.train_step.trace(made.abstract_state(), _abstract_batch(config, mesh)),
        {},
        partial(made.fsdp.init, made.make_model, made.optimizer, seed=config.seed),
        lambda metrics: metrics["loss"],
    )


def gspmd_program(recipe: Recipe, config: ConfigDict, mesh: Mesh) -> Program:
    """The step of benchmarks/gspmd.py, with MaxText's options where that is a GPU's."""
    with config.unlocked():
        config.model.dtype = config.policy.precision.compute
    optimizer = recipe.make_optimizer(config)
    make_model = _without_dropout(partial(recipe.make_model, config))
    abstract, graphdef = gspmd.abstract_state(make_model, optimizer, mesh)

    def make() -> Any:
        params = nnx.state(make_model(nnx.Rngs(config.seed)), nnx.Param)
        return params, optimizer.init(params)

    step = gspmd.train_step(
        graphdef,
        optimizer,
        mesh,
        gspmd.Form(
            config.policy.remat,
            # On one device chunks of logits split no tokens that devices share.
            chunk=config.model.loss_chunk if mesh.size == 1 else None,
        ),
        abstract,
        config.policy.accumulate,
    )
    device = mesh.devices.flat[0]
    return Program(
        step.trace(abstract, _abstract_batch(config, mesh)),
        compiling.supported("maxtext", device)[0] if device.platform == "gpu" else {},
        jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract)),
        lambda loss: loss,
    )


SYSTEMS = {"jshard": jshard_program, "gspmd": gspmd_program}


def compile_gspmd(job: Job, topology: str) -> jax.stages.Compiled:
    """GSPMD's step of a job, for absent GPUs.

    Args:
      job: what is trained.
      topology: of the GPUs, as in "h200:1".
    """
    with (
        open_recipe(find_recipe(job.recipe)) as recipe,
        tracing_for(parse(topology)[0]),
    ):
        config = job.config(recipe)
        settings = configure(recipe, config).settings
        mesh = make_mesh(settings.mesh, devices(topology))
        program = gspmd_program(recipe, config, mesh)
        return program.traced.lower().compile(program.options)


def _without_dropout(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """Removes dropout of rate 0, whose random streams are no parameters."""

    def make(rngs: nnx.Rngs) -> Any:
        model = make_model(rngs)
        for module in (model, model.blocks):
            if hasattr(module, "dropout"):
                assert module.dropout.rate == 0, "GSPMD's step has no dropout"
                del module.dropout
                module.dropout = _same
        return model

    return make


def _same(x: jax.Array) -> jax.Array:
    return x


def _abstract_batch(config: ConfigDict, mesh: Mesh) -> Any:
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        random_batch(config.model, config.batch_size),
    )


if __name__ == "__main__":
    main()
