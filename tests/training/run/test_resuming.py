"""Whole runs that go on where their folder's checkpoints end, or say why not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

import jshard
from checkpoints import data_file, flip_bit
from jshard.data.position import read_position
from jshard.export import export
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete
from jshard.recipe.config.settings import settings_of
from jshard.recipe.load import open_recipe
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import UserError
from jshard.system.files.lock import lock_folder
from jshard.system.jobs.peers import Peers
from jshard.training.run.metrics_lines import cut_back
from jshard.training.run.start import Start, find_start
from resumable import read_metrics
from stopped_runs import GIVEN, NO_NOISE, STEPS, go_on, train

pytestmark = pytest.mark.usefixtures("compiled_once")


def start_of(run: Path, held: int | None = None) -> Start:
    """Where a run would go on whose process holds the state of a step."""
    with open_recipe(run.parent / "tiny.py") as recipe:
        config = complete(recipe.get_config(), "tiny.py")
        given = {key.replace("__", "."): value for key, value in GIVEN.items()}
        override(config, given, "tiny.py")
        settings, recorded = settings_of(config), config.to_dict()
        return find_start(run, settings, recorded, Peers(), held=held)


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


@pytest.mark.slow  # test_promises.py restores on other meshes
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
        cut_back(run, step, start.restored)
        kept = [(x["step"], x["loss"]) for x in read_metrics(run) if "loss" in x]
        want = [(x["step"], x["loss"]) for x in read_metrics(whole) if "loss" in x]
        assert kept == want[:step]


@pytest.mark.parametrize(("held", "step"), [(5, 6), (6, 6), (7, 7)])
def test_a_state_at_hand_is_gone_on_from_unless_the_checkpoint_is_newer(
    held, step, run
):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "time": 1.0, "loss": 4.0}\n')
    start = start_of(run, held)
    assert (start.step, start.held, start.resumes) == (step, held == step, True)
    assert not start.restored
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


@pytest.mark.quick("keys1", "keys2")
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


@pytest.mark.slow  # data/test_streams.py has every source
def test_a_run_goes_on_with_another_batch_size_at_the_next_example(run, whole):
    keys: dict[str, Any] = {"eval_every": 0, "checkpoint__accept": ("batch_size",)}
    go_on(run, steps=8, batch_size=16, **keys)
    lines, want = (
        {line["step"]: line for line in read_metrics(x) if "loss" in line}
        for x in (run, whole)
    )
    means = [(want[i]["token_sum"] + want[i + 1]["token_sum"]) / 2 for i in (7, 9)]
    assert [lines[step]["token_sum"] for step in (7, 8)] == means
    assert [lines[step]["tokens_seen"] / 8 for step in (6, 7, 8)] == [48, 64, 80]
    # What a third batch size goes on from.
    assert read_position(run / "checkpoints/8", 8, 4) == 80


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_run_goes_on_with_anothers_optimizer_schedule_and_averages(
    whole, tmp_path, capsys
):
    keys = {"checkpoint__restore": whole, "checkpoint__restore_optimizer": True}
    new = train(tmp_path, steps=1, eval_every=0, **keys, **NO_NOISE)
    before, after = (
        ocp.load(run / f"checkpoints/{step}/state")
        for run, step in ((whole, STEPS), (new, 1))
    )
    assert int(after["opt_state"]["1"]["count"]) == STEPS + 1
    assert int(after["step"]) == 1
    said = f"from its optimizer after {STEPS} updates: schedules and averages go on"
    assert said in capsys.readouterr().out
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    rate = read_metrics(new)[0]["learning_rate"]
    assert rate == pytest.approx(float(schedule(STEPS)))
    d = (2 + STEPS) / (11 + STEPS)
    average, old = after["ema"]["head"]["kernel"], before["ema"]["head"]["kernel"]
    want = d * old + (1 - d) * after["params"]["head"]["kernel"]
    np.testing.assert_allclose(average, want, rtol=1e-5)
