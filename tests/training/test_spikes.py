"""A run goes on past spikes, tells of them, and ends after too many in a row."""

import contextlib
import io
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jshard
from jshard.system.errors import RunFailed
from jshard.training.non_finite import describe_skipped, too_many_spikes
from test_trainer import ROWS, make

pytestmark = pytest.mark.usefixtures("compiled_once")

STEPS, BAD = 16, {7: 30.0, 9: np.nan, 11: 30.0, 12: 30.0, 13: 30.0}


def trainer(folder: Any, most: int, devices: int = 8, **config: Any) -> jshard.Trainer:
    """One whose steps in ``BAD`` have noise for a batch."""
    rows = [ROWS[i % 45] * BAD.get(i // 16 + 1, 1.0) for i in range(STEPS * 16)]
    config = {"steps": STEPS, "watch.spikes": most} | config
    return make(
        folder,
        train_data=lambda: ({"inputs": x} for x in rows),
        make_optimizer=lambda config: jshard.optim.skip_spikes(
            optax.adam(0.01), k=6.0, window=4
        ),
        mesh=jshard.make_mesh(devices=jax.devices()[:devices]),
        config=config,
    )


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[jshard.Trainer, str, str]:
    """A run of all steps, what it says, and its report."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = trainer(folder, most=4).fit()
    return run, said.getvalue(), (folder / "run" / "report.html").read_text()


def test_a_run_goes_on_past_spikes_and_says_how_many_there_were(whole):
    run, said, page = whole
    lines = [line for line in run.metrics if "loss" in line]
    assert [x["step"] for x in lines if x["skipped"]] == [7, 9, 11, 12, 13]
    assert lines[0]["loss_limit"] is None
    assert lines[6]["loss"] > lines[6]["loss_limit"] > lines[5]["loss"]
    assert re.search(r"step 7: the optimizer skipped its update, loss \S+ of at", said)
    assert "step 9: its gradients are not finite" in said
    assert "5 of 16 steps made no update (skipped_steps)" in said
    assert re.search(r">5<.{0,80}steps without an update", page, re.DOTALL)


def test_too_many_in_a_row_end_the_run_which_is_saved_and_goes_on(tmp_path, whole):
    run = trainer(tmp_path, most=3, **{"checkpoint.every": 100})
    said = (
        r"^skip_spikes skipped the last 3 steps, up to step 13: look at .* raise k "
        r"\(optimizer.skip_spikes\); the state of step 15 is saved$"
    )
    with pytest.raises(RunFailed, match=said):
        run.fit()
    ended = trainer(tmp_path, most=3, **{"checkpoint.every": 100}).fit()
    assert bits(ended.state) == bits(whole[0].state)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7, 12])
def test_what_is_remembered_comes_back_and_a_run_goes_on_with_the_same_bits(
    tmp_path, step, whole
):
    saves = {"checkpoint.every": step, "checkpoint.keep": 9}
    ended = trainer(tmp_path, most=4, **saves, steps=step).fit()
    again = trainer(tmp_path, most=4, devices=4, **saves)
    assert bits(again.state.opt_state) == bits(ended.state.opt_state)
    assert bits(trainer(tmp_path, most=4, **saves).fit().state) == bits(whole[0].state)


@pytest.mark.slow
def test_the_same_steps_are_skipped_on_another_mesh(tmp_path):
    saves = {"checkpoint.every": 8}
    trainer(tmp_path, most=4, **saves, steps=8).fit()
    run = trainer(tmp_path, most=4, devices=2, **saves).fit()
    lines = [line for line in run.metrics if "loss" in line]
    assert [x["step"] for x in lines if x["skipped"]] == [7, 9, 11, 12, 13]


def test_a_row_is_too_long_again_after_as_many_more():
    told = [bool(too_many_spikes(9, {"spikes_in_a_row": n}, 3)) for n in range(7)]
    assert told == [False, False, False, True, False, False, True]
    assert too_many_spikes(9, {}, 1) == ""


def test_a_skipped_step_that_is_no_spike_is_told_as_before():
    metrics = {"skipped": 1.0, "loss": 1.0, "grad_norm": 2.0}
    said = "step 3: the optimizer skipped its update, grad_norm 2"
    assert describe_skipped(3, metrics) == said
