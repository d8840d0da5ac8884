"""`python -m jshard.inspect` shows a checkpoint without reading its arrays."""

import json
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import at_step, data_file, flip_bit
from command_line import shown
from jshard import inspect
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from known_states import abstract, make_state


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    state = make_state(abstract(2, 4))
    config = {"steps": 9, "optimizer": {"peak": 0.5}}
    with Checkpointer(folder / "checkpoints") as checkpointer:
        for step in (4, 8):
            metrics = {"eval_loss": 1 / step}
            checkpointer.save(at_step(state, step), metrics=metrics, config=config)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def test_the_newest_checkpoint_is_shown_with_all_that_describes_it(
    saved, monkeypatch, capsys
):
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, saved)
    assert (code, err) == (0, "")
    for part in (
        "2 checkpoints, the newest is shown",
        "checkpoints/8\n",
        "step        8, saved 20",
        f"jax {jax.__version__}",
        "replica 2 x fsdp 4; processes 1",
        "eval_loss 0.125",
        "steps=9, optimizer.peak=0.5",
        "params      1,227 in 5 arrays, 4.8 KiB",
        "(4, 16, 16)  stacked",
    ):
        assert part in out
    assert "was training" not in out  # it has no account


def test_where_a_runs_time_went_is_the_first_line(run, monkeypatch, capsys):
    line = {
        "attempt": 1, "from_step": 0, "reached": 0, "started": 5.0, "time": 25.0,
        "step": 8, "seconds": {"starting": 5.0, "training": 15.0},
    }  # fmt: skip
    (run / "attempts.jsonl").write_text(f"{json.dumps(line)}\n")
    code, out, _ = shown(monkeypatch, capsys, inspect._inspect, run)
    assert code == 0
    first = "of 20 s in 1 attempt, 75% was training; 25% starting"
    assert out.splitlines()[0] == first


def test_metrics_that_are_arrays_are_numbers():
    metrics: dict[str, Any] = {"eval_loss": jnp.float32(0.125), "x": np.float64(2)}
    about = metadata.describe(abstract(2, 4), config={}, metrics=metrics)
    assert about["metrics"] == {"eval_loss": 0.125, "x": 2.0}
    assert json.loads(json.dumps(about["metrics"])) == about["metrics"]


def description(step: Path, names: list[str], config: dict[str, Any]) -> None:
    """Rewrites what a checkpoint says of its arrays and its config."""
    about = json.loads((step / "description.json").read_text())
    array = {"shape": [4, 2], "dtype": "float32", "layer_dims": 0, "random": False}
    arrays = dict.fromkeys(names, array) | {"opt.count": array | {"shape": []}}
    about |= {"arrays": arrays, "config": config}
    (step / "description.json").write_text(json.dumps(about))


def test_a_hundred_arrays_fit_a_screen_and_are_listed_in_full_if_asked_for(
    run, monkeypatch, capsys
):
    params = [f"params.blocks.{i}.{name}" for i in range(12) for name in ("up", "down")]
    moments = [
        name.replace("params", f"opt.{m}") for m in ("mu", "nu") for name in params
    ]
    config = {f"key_{i}": "v" for i in range(100)}
    step = run / "checkpoints/8"
    description(step, [*params, *moments], config)
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, step)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) <= 100 or "checkpoint" in max(lines, key=len)
    assert [line.split(maxsplit=2) for line in lines[-5:]] == [
        ["params.blocks.*.up", "float32", "384 B  12 x (4, 2)"],
        ["params.blocks.*.down", "float32", "384 B  12 x (4, 2)"],
        ["opt.mu.*", "float32", "768 B  24 arrays, as in params"],
        ["opt.nu.*", "float32", "768 B  24 arrays, as in params"],
        ["opt.count", "float32", "4 B  ()"],
    ]
    (more,) = [line for line in lines if line.endswith("more: --full")]
    named = out.count("=v")
    assert more.split()[:2] == ["and", str(100 - named)]
    _, out, _ = shown(monkeypatch, capsys, inspect._inspect, step, "--full")
    assert out.count("=v") == 100
    for name in (*params, *moments):
        assert f"{name} " in out


def test_arrays_are_not_read(run, monkeypatch, capsys):
    for step in (4, 8):
        data_file(run / f"checkpoints/{step}").unlink()
    code, out, _ = shown(monkeypatch, capsys, inspect._inspect, run)
    assert code == 0
    assert "params.layers.linear.kernel" in out


def test_verifying_names_every_damaged_file_and_exits_2(run, monkeypatch, capsys):
    code, out, _ = shown(monkeypatch, capsys, inspect._inspect, run, "--verify")
    assert code == 0
    assert "checkpoints/4: intact\n" in out
    assert "checkpoints/8: intact\n" in out
    file = data_file(run / "checkpoints/4")
    flip_bit(file)
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, run, "--verify")
    assert code == 2
    assert f"{file.name} has another checksum" in out
    assert "checkpoints/8: intact\n" in out
    assert err == "jshard: error: 1 of 2 checkpoints damaged\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "nosuch does not exist"),
        (["."], "holds no checkpoint"),
        ([], "PATH is missing; see --help"),
        (
            ["run", "--verifi"],
            "unknown argument '--verifi'; did you mean --verify?",
        ),
        (["run"], "description.json"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    words, said, run, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path if words != ["."] else Path(__file__).parent)
    (run / "checkpoints/8/description.json").unlink()
    code, _, err = shown(monkeypatch, capsys, inspect._inspect, *words)
    assert code == 2
    assert err.startswith("jshard: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_every_checkpoint_that_can_be_is_shown_beside_one_that_cannot(
    run, monkeypatch, capsys
):
    (run / "checkpoints/8/description.json").write_text("[]")
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, run)
    assert code == 2
    assert err.startswith("jshard: error: 1 of 2 checkpoints cannot be shown: checkp")
    assert "8 is damaged: description.json describes no checkpoint" in err
    assert err.count("\n") == 1
    assert "  8  cannot be shown: " in out
    assert "step        4, saved 20" in out
    assert "(4, 16, 16)  stacked" in out
    (run / "checkpoints/4/manifest.json").write_text('{"format": 99}')
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, run, "--verify")
    assert code == 2
    assert "4 was written by a newer jshard" in out
    assert err == "jshard: error: 2 of 2 checkpoints damaged\n"


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", '{"arrays": {"a": 3}}', "\x00", '{"step": 1}']
)
def test_a_description_of_another_kind_is_one_line(text, run, monkeypatch, capsys):
    step = run / "checkpoints/8"
    (step / "description.json").write_text(text)
    code, _, err = shown(monkeypatch, capsys, inspect._inspect, step)
    assert code == 2
    assert err.startswith(f"jshard: error: checkpoint {step} is damaged: description")
    assert err.count("\n") == 1


def test_a_folder_that_cannot_be_read_is_one_line(run, monkeypatch, capsys):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    code, _, err = shown(monkeypatch, capsys, inspect._inspect, run)
    assert (code, err) == (
        2,
        f"jshard: error: cannot read {run}: Permission denied\n",
    )


def test_it_is_a_command_of_its_own(saved, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inspect", str(saved), "--verify"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr("warnings.formatwarning", None)  # the command sets its own
    monkeypatch.delitem(sys.modules, "jshard.inspect")
    code: Any = 0
    try:
        runpy.run_module("jshard.inspect", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.endswith("8: intact\n")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(saved):
    words = [sys.executable, "-m", "jshard.inspect", saved]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
