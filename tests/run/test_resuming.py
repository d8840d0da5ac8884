"""Whole runs that go on where their folder's checkpoints end, or say why not."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

import jshard
from checkpoints import data_file, flip_bit, remount, small_disk
from jshard.checkpoint.restore import find_damage
from jshard.checkpoint.step_folders import find_steps
from jshard.config.overrides import override
from jshard.config.run_config import complete
from jshard.distributed.peers import Peers
from jshard.errors import Preempted, RunFailed, UserError
from jshard.export import export
from jshard.recipe.load import open_recipe
from jshard.run.lock import lock_folder
from jshard.run.progress import ProgressDisplay
from jshard.run.start import Start, find_start
from resumable import RECIPE as WITH_ADAM
from resumable import read_metrics
from resumable import train as train_recipe

pytestmark = pytest.mark.usefixtures("compiled_once")
STEPS = 12
# An optimizer with a state, whose step is soon compiled.
ADAM, MOMENTUM = (
    "optax.adamw(learning_rate(config))",
    "optax.sgd(learning_rate(config), 0.9)",
)
assert ADAM in WITH_ADAM
RECIPE = WITH_ADAM.replace(ADAM, MOMENTUM)
train = functools.partial(train_recipe, recipe=RECIPE)
# Without nnx.Dropout, whose plain random streams depend on the mesh.
NO_NOISE: dict[str, Any] = {"model__noise": 0.0}
GIVEN: dict[str, Any] = {"steps": STEPS, "eval_every": 6} | NO_NOISE


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run of twelve steps, evaluated after the sixth and the last."""
    return train(tmp_path_factory.mktemp("whole"), **GIVEN)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that a signal ended at step 6, with checkpoints 4 and 6."""
    return train_to(6, tmp_path_factory.mktemp("stopped"))


def train_to(step: int, folder: Path, **keys) -> Path:
    """Trains to ``step`` of twelve and sends SIGTERM there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jshard.training.callbacks.preemption.Preemption.requested",
            lambda self, now: now == step,
        )
        with pytest.raises(Preempted, match=f"at step {step}: saved"):
            train(folder, **(GIVEN | keys))
    return folder / "run"


def go_on(run: Path, **keys) -> Path:
    """Gives the same command again."""
    return train(run.parent, **(GIVEN | keys))


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    """A copy of the stopped run; its parent is the folder to train in."""
    shutil.copytree(stopped, tmp_path / "run")
    shutil.copy(stopped.parent / "tiny.py", tmp_path)
    return tmp_path / "run"


def start_of(run: Path, held: int | None = None) -> Start:
    """Where a run would go on whose process holds the state of a step."""
    with open_recipe(run.parent / "tiny.py") as recipe:
        config = complete(recipe.get_config(), "tiny.py")
        given = {key.replace("__", "."): value for key, value in GIVEN.items()}
        override(config, given, "tiny.py")
        return find_start(run, config, Peers(), held=held)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def evaluated(run: Path) -> list[int]:
    """The steps after which a run was evaluated."""
    return [line["step"] for line in read_metrics(run) if "eval_loss" in line]


# Runs that go on.


def test_a_resumed_run_computes_what_the_uninterrupted_one_did(
    run, stopped, whole, capsys
):
    go_on(run)
    assert read_metrics(run) == read_metrics(whole)
    assert find_steps(run / "checkpoints") == find_steps(whole / "checkpoints")
    assert capsys.readouterr().out.startswith(f"resuming {run} after step 6\n")
    # The evaluation that the signal cut short is made up for.
    assert evaluated(stopped) == []
    assert evaluated(run) == evaluated(whole) == [6, 12]


@pytest.mark.slow
def test_a_run_may_be_stopped_at_every_step(whole, tmp_path):
    for step in (1, 2, 7):
        run = train_to(step, tmp_path)
    go_on(run)
    assert read_metrics(run) == read_metrics(whole)


@pytest.mark.quick("1-8")
@pytest.mark.parametrize(("shards", "replica"), [(4, 1), (2, 2), (1, 8), (1, 1)])
def test_another_mesh_goes_on_with_the_same_data_within_rounding(
    shards, replica, whole, tmp_path, capsys
):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/12")  # as if it had been killed before it
    mesh = {"mesh__fsdp": shards, "mesh__replica": replica}
    train(tmp_path, **(GIVEN | mesh))
    said = capsys.readouterr().out
    assert "resuming" in said
    assert "after step 8; config differs from the run's: mesh.fsdp" in said
    got, want = read_metrics(run), read_metrics(whole)
    assert [line["step"] for line in got] == [line["step"] for line in want]
    for got_line, want_line in zip(got, want, strict=True):
        assert got_line.keys() == want_line.keys()
        for name, value in want_line.items():
            if "token" in name or name in ("step", "learning_rate"):
                assert got_line[name] == value, name  # the very same tokens
            else:
                np.testing.assert_allclose(got_line[name], value, rtol=1e-5)


def test_a_longer_run_goes_on_from_a_finished_one(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/report.html").unlink()  # it names the folder
    before = contents(tmp_path / "run")
    train(tmp_path, **GIVEN)
    assert "nothing to do" in capsys.readouterr().out
    after = contents(tmp_path / "run")
    assert "Checkpoints" in after.pop("report.html").decode()
    assert after == before
    longer: dict[str, Any] = GIVEN | {"steps": 14}
    run = train(tmp_path, **longer)
    assert "config differs from the run's: steps 12 -> 14" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(run)][-4:] == [12, 13, 14, 14]
    assert evaluated(run) == [6, 12, 14]  # not at step 12 again


def test_a_run_that_died_at_its_very_end_is_tidied_by_the_same_command(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(run / "checkpoints/8", run / "checkpoints/4.deleting")
    (run / "checkpoints/4.deleting/manifest.json").unlink()
    go_on(run)
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert steps == ["12", "8"]


@pytest.mark.slow
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


# Checkpoints and metrics that are damaged or gone.


def lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    keep_lines(run, lambda lines: lines[:3])


def lose_newest(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/6")


def damage(run: Path) -> None:
    flip_bit(data_file(run / "checkpoints/6"))


def keep_lines(run: Path, choose: Callable[[list[str]], list[str]]) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(choose(metrics.read_text().splitlines(keepends=True))))


def cut(run: Path) -> None:
    keep_lines(run, lambda lines: [*lines[:2], lines[2][:9]])


def begin_later(run: Path) -> None:
    keep_lines(run, lambda lines: lines[3:])


def empty(run: Path) -> None:
    keep_lines(run, lambda lines: [])


def delete(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


LACKED = "; metrics.jsonl lacked lines of steps {}: restored from the copy saved with"
HARM = [
    (lose_checkpoints, 0, "{run} has no checkpoint yet: starting again from step 1"),
    (damage, 4, "resuming {run} after step 4"),
    (
        lose_newest,
        4,
        "after step 4; checkpoints of later steps were saved but are missing: 6",
    ),
    *[
        (harm, 6, "resuming {run} after step 6" + LACKED.format(steps))
        for harm, steps in (
            (delete, "1 to 6"),
            (empty, "1 to 6"),
            (begin_later, "1 to 3"),
            (cut, "3 to 6"),
        )
    ],
]
warned = pytest.mark.filterwarnings("ignore:.*6 is damaged")


@warned
@pytest.mark.parametrize(("harm", "step", "told"), HARM)
def test_a_run_goes_on_from_what_is_left_and_says_what_is_gone(
    harm, step, told, run, whole
):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert any('"step": 6,' in x and "checkpoint_blocked" in x for x in lines)
    harm(run)
    start = start_of(run)
    assert (start.step, start.resumes) == (step, True)
    assert start.checkpoint == (run / f"checkpoints/{step}" if step else None)
    assert told.format(run=run) in start.message
    assert start.unevaluated == (step == 6)
    if step:
        assert start.metrics is not None
        kept = [(x["step"], x["loss"]) for x in start.metrics if "loss" in x]
        want = [(x["step"], x["loss"]) for x in read_metrics(whole) if "loss" in x]
        assert kept == want[:step]


@warned
@pytest.mark.slow
@pytest.mark.parametrize(("harm", "step", "told"), HARM)
def test_what_is_left_leads_to_the_same_end(harm, step, told, run, whole, capsys):
    harm(run)
    go_on(run)
    assert told.format(run=run) in capsys.readouterr().out
    assert read_metrics(run) == read_metrics(whole)
    assert not find_damage(run / "checkpoints/12")


@pytest.mark.parametrize(("held", "step"), [(5, 6), (6, 6), (7, 7)])
def test_a_state_at_hand_is_gone_on_from_unless_the_checkpoint_is_newer(
    held, step, run
):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "time": 1.0, "loss": 4.0}\n')
    start = start_of(run, held)
    assert (start.step, start.held, start.resumes) == (step, held == step, True)
    assert start.metrics is not None
    assert max(line["step"] for line in start.metrics) == step
    assert start.unevaluated == (step == 6)


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(run):
    damage(run)
    with pytest.warns(UserWarning, match="6 is damaged: .*: step 4 is used instead"):
        assert start_of(run).step == 4


def test_metrics_that_are_lost_with_an_older_checkpoint_are_told_of(run):
    for step in (4, 6):
        checkpoint = run / "checkpoints" / str(step)
        (checkpoint / "metrics.jsonl").unlink()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["files"]["metrics.jsonl"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    keep_lines(run, lambda lines: lines[:3])
    told = "; metrics.jsonl lacks steps 4 to 6: they are lost"
    assert start_of(run).message.endswith(told)


@pytest.mark.slow
def test_metrics_that_are_deleted_while_the_run_goes_on_come_back(
    whole, tmp_path, monkeypatch
):
    say = ProgressDisplay.say

    def delete(self, text):
        say(self, text)
        if "checkpoint saved" in text:
            (tmp_path / "run/metrics.jsonl").unlink(missing_ok=True)

    monkeypatch.setattr(ProgressDisplay, "say", delete)
    run = train_to(6, tmp_path)
    monkeypatch.undo()
    go_on(run)
    assert read_metrics(run) == read_metrics(whole)


# Runs that must not.


def test_a_folder_in_which_another_run_trains_is_refused_as_that(run):
    """Its newest checkpoint is incomplete only because it is being replaced."""
    flip_bit(data_file(run / "checkpoints/6"))
    flip_bit(data_file(run / "checkpoints/4"))
    said = rf"another process \({os.getpid()}\) is training in --workdir={run}"
    with lock_folder(run), pytest.raises(UserError, match=said):
        go_on(run)
    with pytest.raises(UserError, match="damaged"):
        go_on(run)


@pytest.mark.quick("4")  # RunFolder's own test has the other branch
@pytest.mark.parametrize(("every", "again"), [(4, True), (0, False)])
def test_a_run_whose_folder_is_deleted_fails_and_says_so(again, every, tmp_path):
    def delete(trainer, step, metrics):
        if step == 6:
            (tmp_path / "run").rename(tmp_path / "gone")
            if again:
                (tmp_path / "run").mkdir()

    (tmp_path / "tiny.py").write_text(RECIPE)
    trainer = jshard.Trainer(
        tmp_path / "tiny.py",
        config={
            "steps": 10,
            "eval_every": 0,
            "checkpoint.every": every,
            "model.noise": 0.0,
        },
        workdir=tmp_path / "run",
        on_step=delete,
    )
    with pytest.raises(RunFailed, match=r"run was deleted, moved or replaced while"):
        trainer.fit()
    assert int(trainer.state.step) == (8 if every else 10)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"model__width": 32},
            r"model.width 16 -> 32; it cannot be resumed with this one: .*\(64, 32\)",
        ),
        ({"seed": 1}, "seed 0 -> 1; .*--config.checkpoint.accept=seed"),
        ({"batch_size": 16}, "batch_size 8 -> 16"),
        (
            {"model__width": 32, "checkpoint__accept": ("model",)},
            r"params.embed.embedding has shape \(64, 16\), not \(64, 32\)",
        ),
    ],
)
def test_a_resumed_run_is_the_same_run_or_refused_and_left_alone(keys, said, run):
    before = contents(run)
    with pytest.raises(jshard.UserError, match=said) as error:
        go_on(run, **keys)
    if "model__width" in keys:  # no way out, which would be refused too
        assert "accept" not in str(error.value)
    assert contents(run) == before


def test_a_run_without_a_whole_checkpoint_is_refused_and_left_alone(run):
    for step in find_steps(run / "checkpoints"):
        (run / "checkpoints" / str(step) / "manifest.json").unlink()
    before = contents(run)
    with pytest.raises(jshard.UserError, match=r"can be used: step 6 .*; step 4 "):
        go_on(run)
    assert contents(run) == before


def test_a_run_whose_checkpoints_are_gone_is_refused_and_left_alone(run):
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(jshard.UserError, match=r"the checkpoints of .* are missing"):
        go_on(run)
    assert contents(run) == before


def test_a_newer_checkpoint_is_refused_and_left_alone(run):
    file = run / "checkpoints/6/manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    before = contents(run)
    with pytest.raises(jshard.UserError, match="newer jshard"):
        go_on(run)
    assert contents(run) == before


@pytest.mark.slow  # by default test_resume.py and test_metrics.py have both halves
def test_a_run_that_never_saves_is_not_written_over(tmp_path):
    keys: dict[str, Any] = {"steps": 1, "checkpoint__every": 0, "eval_every": 0}
    train(tmp_path, **keys)
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(jshard.UserError, match="already holds a run"):
        train(tmp_path, **keys)


# Another run's parameters.


@pytest.mark.quick("safetensors")  # test_checkpoint.py has the others
@pytest.mark.parametrize("kind", ["run", "step", "safetensors"])
def test_a_run_starts_from_anothers_parameters(kind, whole, tmp_path):
    path = {"run": whole, "step": whole / "checkpoints/12"}.get(kind)
    if path is None:
        path = tmp_path / "exported"
        export(whole, path)
    keys: dict[str, Any] = {"optimizer__peak": 0.0} | NO_NOISE
    new = train(tmp_path, steps=1, checkpoint__restore=path, **keys)
    last = read_metrics(whole)[-1]
    assert last["step"] == STEPS
    # Without a learning rate it still is what was restored.
    evaluation = read_metrics(new)[-1]
    assert evaluation["eval_loss"] == last["eval_loss"]
    assert evaluation["eval_ema_loss"] == last["eval_loss"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_run_starts_from_anothers_optimizer_too(whole, tmp_path):
    keys = {"checkpoint__restore": whole, "checkpoint__restore_optimizer": True}
    new = train(tmp_path, steps=1, **keys)
    saved = ocp.load(new / "checkpoints/1/state")
    assert int(saved["opt_state"]["1"]["count"]) == STEPS + 1
    assert int(saved["step"]) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"checkpoint__restore": "nosuch"}, "nosuch does not exist"),
        ({"checkpoint__restore": "."}, "holds no checkpoint"),
        (
            {"checkpoint__restore": "{whole}", "model__width": 32},
            r"params.head.kernel has shape \(16, 64\), not \(32, 64\)",
        ),
        (
            {"checkpoint__restore": "other.safetensors"},
            "is of another model: .* is missing",
        ),
    ],
)
def test_parameters_that_cannot_be_restored_are_one_line_before_anything_is_set_up(
    keys, said, whole, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_file({"head": np.zeros(3, np.float32)}, "other.safetensors")
    given: dict[str, Any] = {
        k: v.format(whole=whole) if isinstance(v, str) else v for k, v in keys.items()
    }
    with pytest.raises(jshard.UserError, match=said):
        train(tmp_path, steps=1, eval_every=0, **given)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


# Disks.


@pytest.mark.filterwarnings("ignore:cannot write to .*disk")
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    whole, tmp_path, capsys
):
    with small_disk(tmp_path / "disk", "400k") as disk:

        def when_told(text: str) -> None:
            if "checkpoint saved" in text and not (disk / "other").exists():
                size = shutil.disk_usage(disk).free - 20_000
                (disk / "other").write_bytes(bytes(size))
            if "failed, training continues" in text:
                remount(disk, "size=4m")

        with pytest.MonkeyPatch.context() as patch:
            say = ProgressDisplay.say
            patch.setattr(
                ProgressDisplay,
                "say",
                lambda self, text: (say(self, text), when_told(text)),
            )
            longer: dict[str, Any] = GIVEN | {"steps": 16, "eval_every": 0}
            run = train(disk, **longer)
        out = capsys.readouterr().out
        assert "failed, training continues: No space left on device\n" in out
        want = [line for line in read_metrics(whole) if "eval_loss" not in line]
        assert read_metrics(run)[:STEPS] == want
        assert 16 in find_steps(run / "checkpoints")
        assert not any(find_damage(path) for path in (run / "checkpoints").iterdir())


def test_a_last_checkpoint_that_fails_ends_the_run_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jshard.checkpoint.manifest.write",
        lambda *_: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(RunFailed, match=r"state of step 1 could not be saved: .*full"):
        train(tmp_path, steps=1, eval_every=0, **NO_NOISE)
