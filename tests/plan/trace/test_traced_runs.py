"""Runs that trace themselves on two CPU devices, and their plans beside the traces."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
RECIPES = ("gpt.py", "digits.py:vit")
KEYS = ["--config.mesh.cpu_devices=2", "--config.batch_size=8"]
RUN = [
    "--config.steps=10", "--config.profile.steps=5:9", "--config.eval_every=0",
    "--config.checkpoint.every=0",
]  # fmt: skip


def run(command, *words):
    """(exit code, standard output, error)"""
    done = subprocess.run(
        [sys.executable, "-m", f"jshard.{command}", *words],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for recipe in RECIPES:
        words = [f"--config={recipe}", f"--workdir={folder / recipe}", *KEYS, *RUN]
        code, _, error = run("train", *words)
        assert code == 0, error
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_s_trace_has_all_its_steps_on_both_devices(runs, recipe):
    traced = runs / recipe
    file = traced / "profile" / "plan.json"
    words = [f"--config={recipe}", "--topology=attached", *KEYS]
    code, out, error = run("plan", *words, f"--profile={traced}", f"--json={file}")
    assert code == 0, error
    found = json.loads(file.read_text())["profile"]
    assert found["program"] == "jit_train_step"
    assert [step["step"] for step in found["steps"]] == [5, 6, 7, 8, 9]
    assert (found["devices"], found["notes"]) == ([0, 1], [])
    assert not {x["cause"] for x in found["deviations"]} & {"missing", "extra"}
    assert "expected is the median of each operation" in out


def test_a_trace_of_another_run_is_refused(runs):
    words = [f"--config={RECIPES[0]}", "--topology=attached", *KEYS]
    code, _, error = run("plan", *words, f"--profile={runs / RECIPES[1]}")
    assert code == 2
    assert "this is a trace of another jit_train_step" in error
