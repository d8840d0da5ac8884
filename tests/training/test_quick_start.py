"""The quick start as a stranger runs it: from another folder, with nothing set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jshard
from jshard.recipe.load import find_recipe, open_recipe

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_quick_start_beats_a_bigram_model_on_held_out_text(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),  # nothing is compiled yet
    }
    run = subprocess.run(
        [sys.executable, "-m", "jshard.train", "--config=gpt.py", "--workdir=run"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row]
    notes = json.loads((tmp_path / "run" / "notes.json").read_text())
    bigram = notes["references"]["bigram model"]
    assert losses[-1] < bigram - 0.3
    assert losses == sorted(losses, reverse=True)
    assert len(notes["generated"]) == len(losses)
    assert "sample:\nclass Parser:\n    def" in run.stdout
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"{bigram:.2f}" in report


def test_gpt2_124m_has_the_parameters_of_gpt2():
    with open_recipe(find_recipe("gpt2_124m.py")) as recipe:
        config = recipe.get_config()
        config.model.vocab_size = 50257  # the recipe's is padded
        fsdp = jshard.FSDP(jshard.make_mesh())
        state = fsdp.abstract_state(
            lambda rngs: recipe.make_model(config, rngs), recipe.make_optimizer(config)
        )
    # 12 (12 D^2 + 13 D) + (V + T) D + 2 D
    assert sum(x.size for x in jax.tree.leaves(state.params)) == 124_439_808


@pytest.mark.slow
def test_gpt2_124m_takes_steps_when_shrunk(tmp_path):
    overrides = {
        "steps": 2,
        "batch_size": 16,
        "eval_every": 0,
        "policy.accumulate": 2,
        "model.num_layers": 2,
        "model.width": 48,
        "model.sequence_length": 32,
        "model.vocab_size": 300,
        "sample.length": 2,
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", "jshard.train", "--config=gpt2_124m.py"),
            "--workdir=run",
            *(f"--config.{key}={value}" for key, value in overrides.items()),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "bfloat16" in run.stdout  # on the wire
    assert "step 2/2" in run.stdout
