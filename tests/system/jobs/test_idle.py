"""A process that is stuck says where, before XLA aborts it."""

import signal
import subprocess
import sys

import pytest

RECIPE = """
import time
import jax
import jshard
from jshard.recipes import gpt
from jshard.recipes.gpt import *  # noqa: F403

def loss_fn(model, batch):
    waits = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "float32"))
    return gpt.loss_fn(model, batch) * (1 + jshard.pmean(waits))

def wait():
    time.sleep(1000)
    return 0.0
"""


@pytest.mark.slow
def test_a_step_that_is_stuck_is_named_before_xla_aborts(command, tmp_path):
    (tmp_path / "stuck.py").write_text(RECIPE)
    small = [f"--config.model.{size}" for size in ("width=32", "num_layers=1")]
    with subprocess.Popen(
        **command(tmp_path, "--config=stuck.py", *small, "--config.mesh.cpu_devices=2")
    ) as process:
        said = []
        for line in process.stderr or ():
            said.append(line)
            if line.startswith("jshard: "):
                break
        process.send_signal(signal.SIGKILL)
    assert said[-1].startswith(
        "jshard: step 1 (computing) has neither made progress"
    ), said
    assert "resumes from its newest checkpoint" in said[-1]
    assert not any("rendezvous" in line.lower() for line in said), said


@pytest.mark.slow
def test_a_process_that_computes_is_left_alone():
    program = """
import time
import jax.numpy as jnp
from jshard.system.jobs import stuck
stuck.IDLE = 2.0
with stuck.IdleDetector(print) as detector:
    detector.at("step", 3)
    end = time.monotonic() + 6
    while time.monotonic() < end:
        jnp.ones(1000).sum()
    print("worked", flush=True)
    time.sleep(5)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    worked, idle = done.stdout.splitlines()
    assert worked == "worked"
    assert idle.startswith("step 3 (step) has neither made progress")
