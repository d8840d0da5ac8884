"""More runs that stop and go on: by default test_resuming.py has one of each kind."""

from typing import Any

import pytest

import jshard
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.training.run.progress import ProgressDisplay
from resumable import read_metrics
from stopped_runs import NO_NOISE, go_on, train, train_to
from test_resuming import HARM, warned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


def test_a_run_may_be_stopped_at_every_step(whole, tmp_path):
    for step in (1, 2, 7):
        run = train_to(step, tmp_path)
    go_on(run)
    assert read_metrics(run) == read_metrics(whole)


def test_the_same_checkpoints_are_kept_as_without_a_stop(tmp_path):
    keys: dict[str, Any] = {"checkpoint__keep": 1, "checkpoint__keep_every": 8}
    keys |= {"checkpoint__best": "eval_loss", "eval_every": 5, "steps": 20} | NO_NOISE
    train(tmp_path, "whole", **keys)
    run = train_to(10, tmp_path, **keys)
    train(tmp_path, **keys)
    steps = find_steps(run / "checkpoints")
    assert steps == find_steps(tmp_path / "whole/checkpoints")
    losses = {m["step"]: m["eval_loss"] for m in read_metrics(run) if "eval_loss" in m}
    assert {8, 16, 20, min(losses, key=lambda step: losses[step])} == set(steps)


@warned
@pytest.mark.parametrize(("harm", "step", "told"), HARM)
def test_what_is_left_leads_to_the_same_end(harm, step, told, run, whole, capsys):
    harm(run)
    go_on(run)
    assert told.format(run=run) in capsys.readouterr().out
    assert read_metrics(run) == read_metrics(whole)
    assert not find_damage(run / "checkpoints/12")


def test_metrics_that_are_deleted_while_the_run_goes_on_come_back(
    whole, tmp_path, monkeypatch
):
    say = ProgressDisplay.say

    def delete(self, text):
        say(self, text)
        if "checkpoint saved" in text:
            (tmp_path / "run/metrics.jsonl").unlink(missing_ok=True)

    monkeypatch.setattr(ProgressDisplay, "say", delete)
    with pytest.warns(UserWarning, match="metrics.jsonl was deleted while the run"):
        run = train_to(6, tmp_path)
    monkeypatch.undo()
    go_on(run)
    assert list(read_metrics(run)) == list(read_metrics(whole))


def test_a_run_that_never_saves_is_not_written_over(tmp_path):
    """By default test_resume.py and test_metrics.py have both halves."""
    keys: dict[str, Any] = {"steps": 1, "checkpoint__every": 0, "eval_every": 0}
    train(tmp_path, **keys)
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(jshard.UserError, match="already holds a run"):
        train(tmp_path, **keys)
