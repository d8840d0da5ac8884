"""Resuming: which configs may go on with a run, and what becomes of its folder."""

import json
import os
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import SessionLog

from jshard.recipe.changes import (
    ABSENT,
    changed_keys,
    check_changes,
    describe_changes,
    read_config,
)
from jshard.recipe.config.settings import settings_of
from jshard.system.errors import RunFailed, UserError
from jshard.system.jobs.peers import Peers
from jshard.training.report.run_files import read_metrics
from jshard.training.run.start import find_start
from killed_run import contents, killed_run, open_folder, small_config
from test_metrics import read_events

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config():
    return small_config()


@pytest.fixture
def run(config, tmp_path):
    return killed_run(tmp_path / "run", config)


def start_of(path, config):
    return find_start(path, settings_of(config), config.to_dict(), Peers())


def test_a_folder_in_place_of_the_metrics_is_one_line(config, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl: Is a dir"):
        start_of(tmp_path, config)


def test_checkpoints_that_cannot_be_listed_are_one_line(config, tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"cannot read .*/checkpoints: Permission"):
        start_of(tmp_path, config)


# The config.


def test_a_config_is_the_one_that_it_was_written_as(run, config):
    assert changed_keys(read_config(run), config.to_dict()) == {}
    assert describe_changes({}) == ""


def test_changed_new_and_lost_keys_are_told_in_one_line(run, config):
    old = read_config(run)
    with config.unlocked():
        config.optimizer.learning_rate = 0.001
        config.optimizer.betas = (0.9, 0.99)
        config.sample.length = 3
        del config.eval_batches
    changes = changed_keys(old, config.to_dict())
    assert changes == {
        "optimizer.learning_rate": (0.003, 0.001),
        "optimizer.betas": ([0.9, 0.95], [0.9, 0.99]),
        "sample.length": (ABSENT, 3),
        "eval_batches": (0, ABSENT),
    }
    check_changes(changes, accept=())
    told = describe_changes(changes)
    assert told.startswith("config differs from the run's: ")
    for part in (
        "optimizer.learning_rate 0.003 -> 0.001",
        "sample.length nothing -> 3",
        "eval_batches 0 -> nothing",
    ):
        assert part in told


def test_what_is_accepted_is_no_change(run, config):
    old = read_config(run)
    config.checkpoint.accept = ("model",)
    assert changed_keys(old, config.to_dict()) == {}


def test_a_group_that_became_a_value_is_a_change():
    changes = changed_keys({"model": "mlp"}, {"model": {"width": 4}})
    assert changes == {"model": ("mlp", ABSENT), "model.width": (ABSENT, 4)}


def test_a_change_of_meaning_is_refused_with_the_flag_that_accepts_it(run, config):
    old = read_config(run)
    config.model.dropout = 0.1
    config.batch_size = 16
    config.steps = 20
    changes = changed_keys(old, config.to_dict())
    with pytest.raises(UserError) as error:
        check_changes(changes, accept=("data",))
    message = str(error.value)
    assert "model.dropout 0.0 -> 0.1" in message
    assert "batch_size 8 -> 16" in message
    assert "steps" not in message
    (flag,) = [word for word in message.split() if word.startswith("--config.")]
    accepted = flag.strip(";").removeprefix("--config.checkpoint.accept=").split(",")
    assert set(accepted) == {"data", "model.dropout", "batch_size"}
    check_changes(changes, accepted)
    check_changes(changes, ("model", "batch_size"))


@pytest.mark.parametrize("key", ["model.name", "data.path", "batch_size", "seed"])
def test_every_key_that_says_what_is_trained_is_guarded(key):
    with pytest.raises(UserError, match=f"{key} 'a' -> 'b'"):
        check_changes({key: ("a", "b")}, accept=("model.nam", "dat", "mode"))


def test_a_key_that_is_no_more_is_accepted_by_its_group():
    changes = {"model.width": (4, ABSENT), "model.depth": (2, ABSENT)}
    with pytest.raises(UserError, match=r"checkpoint\.accept=model;"):
        check_changes(changes, accept=())


@pytest.mark.parametrize("text", [None, "", "[1]"])
def test_a_folder_whose_config_cannot_be_read_is_an_error_that_names_it(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot resume: .*config\.json"):
        read_config(tmp_path)


# The folder.


def test_a_resumed_run_goes_on_after_its_step(run, config):
    before = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    config.steps = 20
    with open_folder(run, config, resume_from=4) as folder:
        kept = (run / "metrics.jsonl").read_bytes()
        folder.write(5, {"loss": 0.125})
        folder.note(sample="b")
    assert kept == b"".join([*before[:4], before[6]])
    lines = list(read_metrics(run))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5]
    assert lines[-1]["loss"] == 0.125
    assert read_config(run)["steps"] == 20
    notes = json.loads((run / "notes.json").read_text())
    assert notes == {"recipe": "mlp.py", "sample": "b", "resumed": [4]}


def test_a_run_that_is_resumed_again_remembers_each_time(run, config):
    for step in (6, 2):
        open_folder(run, config, resume_from=step).__exit__()
    assert json.loads((run / "notes.json").read_text())["resumed"] == [6, 2]
    assert [line["step"] for line in read_metrics(run)] == [1, 2]


def test_a_run_killed_before_its_first_checkpoint_starts_again(run, config):
    with open_folder(run, config, resume_from=0):
        assert list(read_metrics(run)) == []


@pytest.mark.parametrize(("every", "resumes"), [(4, True), (0, False)])
def test_a_run_without_checkpoints_starts_again_only_if_it_would_have_saved(
    every, resumes, run, config
):
    config.checkpoint.every = every
    (run / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    start = start_of(run, config)
    assert (start.step, start.resumes) == (0, resumes)
    assert start.message.endswith("starting again from step 1" if resumes else "")


def test_a_folder_whose_checkpoints_are_gone_does_not_start_again(run, config):
    with open_folder(run, config, resume_from=6) as folder:
        folder.write(4, {"checkpoint_bytes": 8})
    with pytest.raises(UserError, match=r"the checkpoints of .* are missing"):
        start_of(run, config)


def lose(run):
    run.rename(run.with_name("gone"))


def replace(run):
    lose(run)
    run.mkdir()
    (run / "config.json").write_text("{}")


def clear(run):
    (run / "config.json").unlink()


@pytest.mark.parametrize("harm", [lose, replace, clear])
def test_a_folder_that_is_gone_fails_a_save_and_the_end_of_a_run(harm, run, config):
    said = r"run was deleted, moved or replaced while the run trained in it"
    folder = open_folder(run, config, resume_from=6)
    folder.flush()
    harm(run)
    with pytest.raises(RunFailed, match=said):
        folder.flush()
    with pytest.raises(RunFailed, match=said):
        folder.__exit__()


def test_a_run_killed_before_its_first_line_starts_again(config, tmp_path):
    with open_folder(tmp_path, config, resume_from=0) as folder:
        folder.write(1, {"loss": 0.5})
    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["loss"]) == (1, 0.5)


@pytest.mark.parametrize("step", [0, 4])
def test_tensorboard_is_told_to_forget_the_steps_that_are_run_again(step, run, config):
    files = set(run.glob("events.*"))
    with open_folder(run, config, resume_from=step) as folder:
        folder.write(step + 1, {"loss": 0.5, "checkpoint_blocked": 0.25})
    (new,) = set(run.glob("events.*")) - files
    assert new.name > max(file.name for file in files)  # read after them
    events = list(read_events(new))
    (start,) = [event for event in events if event.session_log.status]
    assert (start.session_log.status, start.step) == (SessionLog.START, step + 1)
    values = [(v, e.step) for e in events for v in e.summary.value]
    scalars = [(v.tag, step) for v, step in values if v.HasField("simple_value")]
    assert scalars == [("train/loss", step + 1), ("checkpoint/blocked", step + 1)]


def test_a_line_that_is_none_of_metrics_is_an_error_that_changes_nothing(run, config):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines.insert(2, "{\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    before = contents(run)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3, is not a line"):
        open_folder(run, config, resume_from=4)
    assert contents(run) == before


def test_notes_that_are_no_json_are_an_error_that_changes_nothing(run, config):
    (run / "notes.json").write_text("[")
    before = contents(run)
    with pytest.raises(
        UserError, match=r"notes\.json does not hold a JSON.* give another --workdir"
    ):
        open_folder(run, config, resume_from=4)
    assert contents(run) == before


@pytest.mark.parametrize(
    "notes",
    [
        {"resumed": 3}, {"resumed": ["x"]}, {"stopped": {"step": 4}}, {"run": [1]},
        {"generated": [{"text": "x"}]}, {"samples": []}, {"loggers": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_notes_of_another_form_are_an_error_that_changes_nothing(notes, run, config):
    (run / "notes.json").write_text(json.dumps(notes))
    before = contents(run)
    with pytest.raises(UserError, match=r" in .*notes\.json is not as"):
        open_folder(run, config, resume_from=4)
    assert contents(run) == before


@pytest.mark.parametrize("group", [[], "x", None, 3])
def test_a_config_whose_groups_are_none_is_compared_all_the_same(group, run, config):
    (run / "config.json").write_text(json.dumps({"checkpoint": group}))
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert start_of(run, config).step == 0


def test_a_flush_brings_the_metrics_to_the_disk(config, tmp_path, monkeypatch):
    synced = []
    with open_folder(tmp_path, config) as folder:
        folder.write(1, {"loss": 0.5})
        real = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda file: (synced.append(os.fstat(file)), real(file))
        )
        folder.flush()
    files = [tmp_path / "metrics.jsonl", *tmp_path.glob("events.*")]
    assert {file.stat().st_ino for file in files} <= {file.st_ino for file in synced}
    open_folder(tmp_path, config, enabled=False).flush()
