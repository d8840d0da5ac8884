"""The lines of a long run's metrics: kept on disk, cut back, and never lost unsaid."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import environment
from jshard.training.report.run_files import read_metrics
from jshard.training.run.append import AppendedFile
from jshard.training.run.metrics import RunFolder
from jshard.training.run.metrics_lines import NEWEST, cut_back, look_through

ROOT = Path(__file__).parents[3]
CONFIG = {"steps": 9, "batch_size": 8, "optimizer": {}}


def line(step: int, **values: float) -> str:
    return json.dumps({"step": step, **(values or {"loss": 1 / step})}) + "\n"


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def steps_of(folder: Path) -> list[int]:
    return [values["step"] for values in read_metrics(folder)]


# What is saved with a state.


def test_a_state_is_saved_with_the_newest_lines_alone_however_long_the_run(tmp_path):
    much = {"x" * 2000: 1.0}
    count = 2 * NEWEST // len(line(1000, **much))
    write(tmp_path / "run", *(line(step, **much) for step in range(1, count)))
    with RunFolder(tmp_path / "run", CONFIG, resume_from=count) as folder:
        folder.write(count, {"loss": 1.0})
        folder.flush()
        text = folder.newest_metrics()
        assert NEWEST - 2100 < len(text) <= NEWEST
        assert json.loads(text.splitlines()[0])["step"] > count / 3
        assert json.loads(text.splitlines()[-1])["step"] == count
        everything = (tmp_path / "run/metrics.jsonl").read_text()
        # A bucket that has the first lines alone: all others go with the state.
        at = everything.index(line(9, **much))
        assert folder.newest_metrics(copied=at) == everything[at:]
        assert folder.newest_metrics(copied=0) == everything


def test_lines_that_are_not_on_the_disk_yet_are_saved_however_many(tmp_path):
    file = AppendedFile(tmp_path / "metrics.jsonl")
    file.write(b"synced\n")
    file.sync()
    file.write(b"one\ntwo\n")
    assert file.newest(4, file.synced) == b"one\ntwo\n"
    assert file.newest(5, 10**9) == b"two\n"  # whole lines
    file.sync()
    assert file.newest(4, file.synced) == b"two\n"
    assert file.close() == ""


# What a resumed run finds.


def test_lines_that_the_file_lacks_come_from_the_state_or_are_said_to_be_lost(
    tmp_path,
):
    run = write(tmp_path / "run", *map(line, (1, 2, 5, 6)), line(9))
    late = line(8, checkpoint_bytes=3.0)
    saved = write(tmp_path / "saved", *map(line, (6, 7)), line(7, eval_loss=0.5))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(late)
    found = look_through(run, 7, saved)
    assert found.message == (
        "metrics.jsonl lacked lines of step 7: restored from the copy saved with the "
        "state; metrics.jsonl lacks steps 3 to 4: they are lost"
    )
    assert (found.evaluated, list(found.saved)) == (True, [8])
    cut_back(run, 7, found.restored)
    assert steps_of(run) == [1, 2, 5, 6, 7, 7]
    assert not look_through(run, 7, saved).restored


def test_a_deleted_file_is_the_lines_saved_with_the_state_and_says_the_others(
    tmp_path,
):
    run = tmp_path / "run"
    run.mkdir()
    saved = write(tmp_path / "saved", *map(line, range(90, 101)))
    found = look_through(run, 100, saved)
    assert found.message.endswith("metrics.jsonl lacks steps 1 to 89: they are lost")
    assert "lacked lines of steps 90 to 100" in found.message
    cut_back(run, 100, found.restored)
    assert steps_of(run) == list(range(90, 101))


# The file, deleted or changed under a run.


def delete(file: Path) -> None:
    file.unlink()


def replace(file: Path) -> None:
    file.unlink()
    file.write_text("another's\n")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (delete, r"metrics\.jsonl was deleted while the run trained: it was written"),
        (replace, r"was replaced \(by what is now metrics\.jsonl\.other\) while the"),
    ],
)
def test_metrics_that_are_deleted_under_a_run_are_written_again_and_it_says_so(
    harm, said, tmp_path
):
    folder = RunFolder(tmp_path, CONFIG)
    file = tmp_path / "metrics.jsonl"
    folder.write(1, {"loss": 0.5})
    harm(file)
    folder.write(2, {"loss": 0.25})
    with pytest.warns(UserWarning, match=said):
        folder.flush()
    assert steps_of(tmp_path) == [1, 2]
    folder.write(3, {"loss": 0.25})
    file.unlink()
    with pytest.warns(UserWarning, match="deleted"):
        folder.__exit__()
    assert steps_of(tmp_path) == [1, 2, 3]
    other = tmp_path / "metrics.jsonl.other"
    assert not other.exists() or other.read_text() == "another's\n"


def test_metrics_that_are_cut_off_under_a_run_are_said_to_be_lost(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.write(1, {"loss": 0.5})
        (tmp_path / "metrics.jsonl").write_text("")
        folder.write(2, {"loss": 0.25})
        with pytest.warns(UserWarning, match=r"was cut by \d+ bytes by another prog"):
            folder.flush()
        folder.flush()  # says it once
    assert steps_of(tmp_path) == [2]


# Whole runs.


@pytest.mark.slow
def test_a_long_runs_memory_open_files_and_checkpoints_do_not_grow():
    command = [sys.executable, ROOT / "benchmarks/long_run.py", "--steps=10000"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    )
    found = re.findall(r"^\| (\d.*) \|$", done.stdout, re.M)
    rows = [[int(x.replace(",", "")) for x in row.split(" | ")] for row in found]
    (_, memory, files, size, _), (_, *last) = rows[2], rows[-1]
    assert len(rows) == 5
    assert last[0] < memory + 12  # MiB; all lines, parsed, would be 40 more
    assert last[1] <= files + 2
    assert last[2] < 1.02 * size
