"""Runs that start from a checkpoint of Orbax's, and folders that are Orbax's."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jshard
from stopped_runs import train

WIDTH, TOKENS = 16, 64
KEYS: dict[str, Any] = {"eval_every": 0, "checkpoint__every": 0, "steps": 1}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """The run's model and its momentum after three updates, as Linen would have it."""
    draw = np.random.default_rng(0)
    values = lambda *shape: draw.normal(size=shape).astype(np.float32)
    params = {
        "embed": {"embedding": values(TOKENS, WIDTH)},
        "head": {"kernel": values(WIDTH, TOKENS), "bias": values(TOKENS)},
    }
    tx = optax.sgd(optax.constant_schedule(0.1), 0.9)
    trace, counted = tx.init(params)
    state = {
        "params": params,
        "opt_state": (trace, counted._replace(count=np.asarray(3, np.int32))),
        "best": values(2),
    }
    folder = tmp_path_factory.mktemp("theirs") / "steps"
    with ocp.CheckpointManager(folder) as manager:
        manager.save(8, args=ocp.args.StandardSave(state))
    return folder


def test_a_run_starts_from_a_managers_newest_step_and_says_what_is_what(
    theirs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(theirs.parent)
    keys = KEYS | {"model__noise": 0.0, "checkpoint__restore_optimizer": True}
    train(tmp_path, checkpoint__restore="steps", **keys)
    said = capsys.readouterr().out
    assert f"starting from the parameters of {theirs}/8 (Orbax's checkpoint" in said
    assert "step 8: parameters at params, its optimizer's state at opt_state, " in said
    assert "random streams start anew, step 8; not read: best)" in said
    assert "and from its optimizer after 3 updates: schedules go on" in said


def test_a_workdir_with_checkpoints_of_orbaxs_is_left_as_it_is(theirs, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(theirs)
    with pytest.raises(jshard.UserError, match="holds checkpoints of Orbax's") as error:
        train(tmp_path, **KEYS)
    assert "damaged" not in str(error.value)
    assert "remove" not in str(error.value)
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["checkpoints"]
    assert [x.name for x in theirs.iterdir()] == ["8"]


def test_another_model_is_refused_before_anything_is_written(theirs, tmp_path):
    with pytest.raises(jshard.UserError, match=r"head.kernel has shape \(16, 64\)"):
        train(tmp_path, checkpoint__restore=theirs, model__width=32, **KEYS)
    assert not (tmp_path / "run").exists()
