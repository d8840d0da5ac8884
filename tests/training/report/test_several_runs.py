"""Several runs are compared by their folders: `inspect RUNS` and `report RUN RUN`."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import shown
from jshard import inspect, report
from jshard.system.files.lock import lock_folder
from jshard.training.report.several_runs import as_text, read_runs

STOPPED = {"stopped": {"step": 20, "steps": 30, "why": "early stopping"}}


def write(folder: Path, losses=(), notes=None, evals=(), **config: Any) -> Path:
    """Writes a run's folder, with a loss every ten steps."""
    folder.mkdir(parents=True)
    lines = [{"step": 10 * i, "loss": x} for i, x in enumerate(losses, 1)]
    lines += [{"step": 10 * i, **of} for i, of in enumerate(evals, 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "notes.json").write_text(json.dumps(notes or {}))
    (folder / "config.json").write_text(json.dumps({"steps": 30, **config}))
    return folder


def loss(*values: float) -> list[dict[str, float]]:
    return [{"eval_loss": value} for value in values]


@pytest.fixture
def runs(tmp_path) -> Path:
    folder = tmp_path / "runs"
    write(folder / "a", (3, 2, 1.5), evals=loss(3, 2.5, 2.75), optimizer={"peak": 0.1})
    write(folder / "b", (3, 2), STOPPED, loss(2.25), optimizer={"peak": 0.2}, seed=1)
    write(folder / "c", (4,), evals=loss(4), optimizer={"peak": 0.4})
    (folder / "notes").mkdir()
    (folder / "table.csv").write_text("")
    return folder


def test_a_folder_of_runs_is_a_table_of_what_differs_and_of_results_the_best_first(
    runs, monkeypatch, capsys
):
    code, out, err = shown(monkeypatch, capsys, inspect._inspect, runs)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "run  optimizer.peak  seed  step      loss  eval_loss  best eval_loss   state",
        "b    0.2             1     20 of 30  2     2.25       2.25 at step 10  "
        "stopped: early stopping",
        "a    0.1                   30 of 30  1.5   2.75       2.5 at step 20   done",
        "c    0.4                   10 of 30  4     4          4 at step 10     ended "
        "before its last step",
    ]


def test_runs_are_sorted_by_the_metric_and_the_order_that_their_configs_name(tmp_path):
    best = {"best": "eval_accuracy", "best_is": "highest"}
    for name, values in {"low": (0.25, 0.5), "high": (0.75, 0.7)}.items():
        evals = [{"eval_accuracy": value, "eval_loss": 1 - value} for value in values]
        write(tmp_path / name, evals=evals, checkpoint=best)
    write(tmp_path / "none", (3,), checkpoint=best)
    write(tmp_path / "empty")
    lines = as_text(read_runs(sorted(tmp_path.iterdir())), full=False).splitlines()
    assert [line.split()[0] for line in lines] == [
        "run",
        "high",
        "low",
        "none",
        "empty",
    ]
    assert "eval_accuracy 0.75 at step 10" in lines[1]  # as the metrics differ
    assert "loss 3 at step 10" in lines[3]


def test_more_keys_than_fit_a_screen_are_named_and_listed_by_full(tmp_path):
    for i in range(2):
        write(tmp_path / str(i), (1,), **{f"key{n}": n + i for n in range(8)})
    results = read_runs([tmp_path / "0", tmp_path / "1"])
    assert "2 more of the keys differ: key6, key7; --full" in as_text(
        results, full=False
    )
    assert as_text(results, full=True).split()[:10][1:9] == [
        f"key{n}" for n in range(8)
    ]


def test_names_and_values_are_shown_on_one_line_and_a_run_that_is_named_twice_once(
    tmp_path, monkeypatch, capsys
):
    for i in range(2):
        write(tmp_path / f"{i}\nmore", (1,), note=f"a\nb{i}")
    runs = (tmp_path, tmp_path / "0\nmore")
    code, out, err = shown(monkeypatch, capsys, report._report, *runs)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 4


def test_a_run_that_trains_is_said_to(runs):
    with lock_folder(runs / "c"):
        states = {one.name: one.state for one in read_runs([runs / "a", runs / "c"])}
    assert states == {"a": "done", "c": "training"}


def test_damaged_files_are_left_out_and_named(runs):
    (runs / "a" / "config.json").write_text("{")
    with (runs / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": "low"}\n[]\n')
    text = as_text(read_runs([runs / "a", runs / "b"]), full=False)
    assert "a: left out config.json" in text
    assert (
        "b: left out metrics.jsonl, line 4: 'loss' is not a number, and 1 more" in text
    )


def test_a_page_has_the_curves_of_the_best_runs_and_the_table_of_all(
    tmp_path, monkeypatch, capsys
):
    for i in range(10):
        write(tmp_path / f"<b>{i}", (3, 2 + i), evals=loss(9 - i), seed=i)
    code, out, err = shown(
        monkeypatch, capsys, report._report, *sorted(tmp_path.iterdir())
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'comparison.html'}"
    page = (tmp_path / "comparison.html").read_text()
    keys = [page.count(f'key-{i}">&lt;b&gt;{9 - i}</span>') for i in range(8)]
    assert keys == [2] * 8  # of the loss and of the validation loss
    assert "10 runs, the best first; the charts show the first 8" in page
    assert page.count("<tr>") == 11
    assert "<b>0" not in page
    # The shell's RUNS/* names the page, too, from the second time on.
    code, out, err = shown(
        monkeypatch, capsys, report._report, *sorted(tmp_path.iterdir())
    )
    assert (code, err) == (0, "")
    assert (
        f"skipped {tmp_path / 'comparison.html'}: it is not the folder of a run" in out
    )


def test_the_folder_of_a_run_or_of_its_checkpoints_is_not_a_folder_of_runs(
    runs, monkeypatch, capsys
):
    # A checkpoint has a copy of the metrics.
    write(runs / "a" / "checkpoints" / "10", (3,))
    (runs / "a" / "checkpoints" / "10" / "config.json").unlink()
    for path in (runs / "a", runs / "a" / "checkpoints"):
        code, out, err = shown(monkeypatch, capsys, inspect._inspect, path)
        assert "run  " not in out
        assert (code, err.count("\n")) == (2, 1)  # no checkpoint that can be read


@pytest.mark.parametrize(
    ("of", "words", "expected"),
    [
        (
            inspect._inspect,
            ["runs", "--verify"],
            "--verify: runs holds 3 runs; give one of",
        ),
        (
            inspect._inspect,
            ["runs", "--step=10"],
            "--step: runs holds 3 runs; give one of them",
        ),
        (
            report._report,
            ["runs", "--step=10"],
            "--step=10: is for the report of one run",
        ),
        (
            report._report,
            ["runs/a", "s3://bucket/run"],
            "s3://bucket/run: only runs in local folders",
        ),
        (report._report, ["runs/notes", "."], "none of these is the folder of a run"),
        (
            report._report,
            ["runs", "--output=no/page.html"],
            "cannot write no/page.html: No su",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    of, words, expected, runs, monkeypatch, capsys
):
    monkeypatch.chdir(runs.parent)
    code, _, err = shown(monkeypatch, capsys, of, *words)
    assert code == 2
    assert err.startswith(f"jshard: error: {expected}")
    assert err.count("\n") == 1
