"""The processes of a job begin a program together, however long each compiles it."""

import collections
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src import distributed

import jshard
from failures import WORDS
from jobs import Job, write_recipe
from jshard.system.compat.coordination import processes_of

COUNTS: collections.defaultdict = collections.defaultdict(itertools.count)


@pytest.fixture
def happened(monkeypatch):
    """What was compiled and waited for; devices are as if of processes 0 and 1."""
    events: list[str] = []

    class Client:
        def wait_at_barrier(self, name, timeout, processes):
            assert timeout > 3_600_000
            assert processes == [0, 1]
            events.append(f"wait {name.rpartition(' ')[2]}")

    def record(event, duration_secs, **kwargs):
        if "backend_compile" in event:
            events.append("compile")

    jax.devices()  # which a client makes otherwise
    monkeypatch.setattr(distributed.global_state, "client", Client())
    monkeypatch.setattr("jshard.system.compat.coordination._waits", COUNTS)
    for module in ("step.program.together", "layout.values.initial_values"):
        monkeypatch.setattr(
            f"jshard.sharding.{module}.processes_of", lambda devices: (0, 1)
        )
    COUNTS.clear()
    jax.monitoring.register_event_duration_secs_listener(record)
    yield events
    jax.monitoring.unregister_event_duration_listener(record)


def of_process(index: int) -> SimpleNamespace:
    return SimpleNamespace(process_index=index)


def test_the_processes_of_devices_are_those_that_must_wait():
    assert processes_of(map(of_process, (1, 0, 1, 3))) == (0, 1, 3)
    assert processes_of(map(of_process, (2, 2))) == ()


def test_a_program_is_compiled_then_waited_for_and_then_run_once_a_shape(happened):
    fsdp = jshard.FSDP(jshard.make_mesh())
    make = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    state = fsdp.init(make, optax.sgd(0.1))
    assert happened[-2:] == ["compile", "wait 0"]
    loss = lambda model, x: jshard.Mean(jnp.sum(model(x) ** 2), x.size)
    step = fsdp.train_step(loss, optax.sgd(0.1))
    rows = np.ones((16, 8), np.float32)
    batches = [fsdp.shard_batch(rows[:n]) for n in (8, 8, 16)]
    jax.eval_shape(step, state, batches[0])
    happened.clear()
    for batch in batches:
        state, _ = step(state, batch)
    assert happened == ["compile", "wait 1", "compile", "wait 2"]


# Compiles its train step for long in process 1.
LATE = """
import os
import time

import jax._src.compiler

_compile = jax._src.compiler.backend_compile_and_load


def _late(backend, module, *args, **kwargs):
    name = module.operation.attributes["sym_name"].value
    if jax.process_index() and name == os.environ.get("LATE"):
        time.sleep(35)
    return _compile(backend, module, *args, **kwargs)


jax._src.compiler.backend_compile_and_load = _late
"""


@pytest.mark.slow
def test_a_restart_goes_on_though_one_process_compiles_for_longer_than_gloo_waits(
    tmp_path,
):
    write_recipe(tmp_path, lambda recipe: recipe + LATE)
    # The groups of a hybrid mesh meet in the step first.
    words = (*WORDS, "--config.mesh.replica=2")
    for steps, env in ((2, {}), (4, {"LATE": "jit_train_step"})):
        with Job(tmp_path, 2, 2, *words, f"--config.steps={steps}", env=env) as job:
            assert job.wait() == [0, 0], job.err()
    assert "resuming run after step 2" in job.out()
