"""What a run leaves on disk, measures and shows while it trains."""

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event

import jshard
from checkpoints import small_disk
from jshard.data.examples import count_items
from jshard.plan.fit.hardware import peak_flops
from jshard.system.errors import RunFailed, UserError
from jshard.system.formatting import format_count, format_duration
from jshard.system.pages.png import png
from jshard.training import throughput as speed
from jshard.training.run.append import AppendedFile
from jshard.training.run.metrics import RunFolder
from jshard.training.throughput import Throughput

CONFIG = {"steps": 3, "optimizer": {"betas": (0.9, 0.95)}}


def read_lines(path):
    def fail(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=fail) for line in lines]
    now = time.time()
    assert all(now - 600 < line.pop("time") < now + 1 for line in found)
    return found


def read_events(file):
    """TensorBoard's events, from the record format itself."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[12 + length + 4 :]


def read_scalars(path):
    """TensorBoard's scalars as (tag, step, value)."""
    (file,) = path.glob("events.out.tfevents.*")
    return [
        (value.tag, event.step, value.simple_value)
        for event in read_events(file)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


# The run's folder.


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with RunFolder(tmp_path / "new/run", CONFIG) as folder:
        folder.write(1, {"loss": 0.1 + 0.2})
        assert read_lines(folder.path) == [{"step": 1, "loss": 0.1 + 0.2}]
        folder.write(2, {"loss": 0.25})
        assert read_lines(folder.path)[1] == {"step": 2, "loss": 0.25}


def test_values_that_are_not_finite_are_null_so_that_every_line_is_json(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.write(1, {"loss": 1.0, "grad_norm": float("inf"), "x": float("nan")})
    expected = {"step": 1, "loss": 1.0, "grad_norm": None, "x": None}
    assert read_lines(tmp_path) == [expected]


def test_the_config_is_written_whole(tmp_path):
    with RunFolder(tmp_path, CONFIG, recipe="llama:3-8b"):
        written = json.loads((tmp_path / "config.json").read_text())
    assert written == {
        "recipe": "llama:3-8b",
        "steps": 3,
        "optimizer": {"betas": [0.9, 0.95]},
    }


def test_tensorboard_has_the_same_values_training_and_evaluation_apart(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.write(1, {"loss": 0.5})
        folder.write(2, {"eval_loss": 0.25})
    assert read_scalars(tmp_path) == [("train/loss", 1, 0.5), ("eval/loss", 2, 0.25)]


def test_tensorboard_s_events_need_neither_pytorch_nor_tensorflow(tmp_path):
    # Which cost seconds and 186 MiB where they are installed, for a file of scalars.
    for name in ("torch", "tensorflow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__}')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + (
        "import jshard.training.run.loggers.tensorboard_run"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_tensorboard_has_the_config_and_samples(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.log(3, {"said": "<b>", "drawn": np.zeros((2, 5, 3)), "own": 1.5})
    (file,) = tmp_path.glob("events.out.tfevents.*")
    found = {v.tag: v for event in read_events(file) for v in event.summary.value}
    start = found["_hparams_/session_start_info"].metadata.plugin_data.content
    assert b"optimizer.betas" in start
    assert found["samples/said/text_summary"].tensor.string_val == [b"    <b>\n"]
    image = found["samples/drawn"].image
    assert (image.height, image.width) == (2, 5)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert read_lines(tmp_path) == [{"step": 3, "own": 1.5}]
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "Drawn at step 3" in page


@pytest.mark.parametrize(
    ("picture", "rows"),
    [
        (np.array([[0.0, 1.0], [0.5, 2.0]]), [[0, 0, 255], [0, 128, 255]]),
        (np.array([[[1, 2, 300]]], np.int32), [[0, 1, 2, 255]]),
        (np.array([[True, False]]), [[0, 255, 0]]),
    ],
)
def test_a_picture_is_a_png_file(picture, rows):
    data = png(picture)
    at = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[at - 4 : at])
    pixels = zlib.decompress(data[at + 4 : at + 4 + length])
    assert pixels == bytes(x for row in rows for x in row)
    height, width = picture.shape[:2]
    assert struct.unpack(">II", data[16:24]) == (width, height)


def test_notes_are_added_up(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.note(sample="a", start_up="b")
        folder.note(sample="c")
    notes = json.loads((tmp_path / "notes.json").read_text())
    assert notes == {"sample": "c", "start_up": "b"}


def test_generated_texts_are_kept_by_step(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.sample(2, "a", 3.5)
        folder.sample(4, "b", 2.5)
        folder.sample(4, "c")  # again, after a resumption
        folder.sample(3, "d", 3.0)
    notes = json.loads((tmp_path / "notes.json").read_text())
    assert notes["generated"] == [
        {"step": 2, "eval_loss": 3.5, "text": "a"},
        {"step": 3, "eval_loss": 3.0, "text": "d"},
    ]


def test_a_text_that_is_generated_again_takes_the_place_of_the_first(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        for step, text in ((2, "early"), (4, "first"), (4, "again")):
            folder.sample(step, text)
    notes = json.loads((tmp_path / "notes.json").read_text())
    kept = [(one["step"], one["text"]) for one in notes["generated"]]
    assert kept == [(2, "early"), (4, "again")]


def test_what_waited_for_a_full_disk_is_synced_too(tmp_path, monkeypatch):
    file = AppendedFile(tmp_path / "metrics.jsonl")

    def refuse(data):
        raise OSError(28, "No space left on device")

    disk = SimpleNamespace(write=refuse)
    with monkeypatch.context() as full:
        full.setattr(file, "_file", disk)
        assert file.write(b"late\n") == "No space left on device"
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.fstat(number)), real(number))
    )
    assert file.sync() == ""
    assert [status.st_size for status in synced] == [len(b"late\n")]
    assert file.close() == ""


def test_a_report_is_left_however_the_run_ends(tmp_path):
    def run_that_ends_badly():
        with RunFolder(tmp_path, CONFIG) as folder:
            folder.write(1, {"loss": 0.5})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_that_ends_badly()
    assert "0.5000" in (tmp_path / "report.html").read_text()


def test_a_folder_with_another_runs_metrics_is_refused_and_left_alone(tmp_path):
    with RunFolder(tmp_path, CONFIG) as folder:
        folder.write(1, {"loss": 0.5})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder(tmp_path, {})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write --workdir=.*file/run"):
        RunFolder(tmp_path / "file/run", CONFIG)


def test_a_folder_in_place_of_the_report_is_told_before_the_training(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html is a folder where the report"):
        RunFolder(tmp_path, CONFIG)
    assert not (tmp_path / "metrics.jsonl").exists()


def fill(disk):
    """Leaves no room at all."""
    with (disk / "other").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def write_losses(folder, steps):
    for step in steps:
        folder.write(step, {"loss": 1 / step, "eval_loss": 1.0})
    folder.report()
    folder.flush()


def test_metrics_wait_for_a_disk_that_is_full_for_a_while(tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        with RunFolder(disk, CONFIG) as folder:
            write_losses(folder, range(1, 9))
            fill(disk)
            with pytest.warns(UserWarning, match="No space left") as told:
                write_losses(folder, range(9, 500))
            metrics, events = (str(one.message) for one in told)
            assert metrics.endswith(
                "training continues, and its metrics wait in memory"
            )
            assert re.match("TensorBoard: .*; training continues without it$", events)
            (disk / "other").unlink()
            write_losses(folder, range(500, 510))
        steps = list(range(1, 510))
        assert [line["step"] for line in read_lines(disk)] == steps
        (file,) = disk.glob("events.out.tfevents.*")
        assert file.read_bytes()
        assert (disk / "report.html").exists()


def test_a_disk_that_stays_full_ends_the_run_with_one_line_that_says_so(tmp_path):
    def run(disk):
        with RunFolder(disk, CONFIG) as folder:
            fill(disk)
            write_losses(folder, range(1, 500))

    with (
        small_disk(tmp_path / "disk", "64k") as disk,
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(RunFailed, match=r"cannot write to .*: No space left on device"),
    ):
        run(disk)


def test_a_process_that_is_not_the_first_writes_nothing(tmp_path):
    with RunFolder(tmp_path / "run", CONFIG, enabled=False) as folder:
        folder.write(1, {"loss": 0.5})
        folder.note(sample="a")
        folder.report()
    assert not (tmp_path / "run").exists()


# Throughput.


def test_speed_counts_all_tokens_over_the_wall_time_since_the_restart(monkeypatch):
    now = iter([100.0, 107.0, 109.0, 110.0, 111.0, 113.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(speed, "peak_flops", lambda kind: 1000.0)
    mesh = jshard.make_mesh()
    batch = {"weights": np.ones((8, 16)), "inputs": np.ones((8, 16), np.int32)}
    throughput = Throughput(batch, mesh, flops_per_token=10.0)
    throughput.restart()
    assert throughput.measure(1)["step_time"] == 2.0  # since the restart
    assert throughput.measure(1) == {
        "step_time": 1.0,
        "tokens_per_second": 128.0,
        "mfu": 128.0 * 10 / (1000 * mesh.size),
    }
    assert throughput.measure(0)["step_time"] == 1.0  # that of before
    assert throughput.measure(1, drained=True)["step_time"] == 2.0  # of all three


@pytest.mark.parametrize(("flops", "peak"), [(None, 1000.0), (10.0, None)])
def test_mfu_is_left_out_where_flops_or_peak_are_not_known(flops, peak, monkeypatch):
    monkeypatch.setattr(speed, "peak_flops", lambda kind: peak)
    batch = {"inputs": np.ones((8, 16), np.int32)}
    throughput = Throughput(batch, jshard.make_mesh(), flops)
    assert throughput.measure(1).keys() == {"step_time", "tokens_per_second"}


def test_images_with_labels_are_counted_as_examples():
    batch = {"image": np.ones((4, 8, 8, 3)), "label": np.ones(4, np.int32)}
    assert count_items(batch) == ("examples", 4)


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        (jax.devices("cpu")[0].device_kind, None),
    ],
)
def test_peak_flops_are_those_of_the_device(device_kind, peak):
    assert peak_flops(device_kind) == peak


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (51234, "51.2k"), (999_999, "1M"), (124.4e6, "124M")],
)
def test_counts_have_three_digits_and_a_suffix(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03")]
)
def test_durations_are_minutes_and_seconds_with_hours_when_needed(seconds, text):
    assert format_duration(seconds) == text
