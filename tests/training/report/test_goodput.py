"""Goodput over the attempts of a run: what was kept, lost and down, from its lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_report import Page

from jshard.training.report.goodput import format_long, newest_attempt, read_goodput
from jshard.training.report.run_report import write_report


def line(attempt: int, at: float, step: int, **seconds: float) -> dict[str, Any]:
    """A line of an attempt that began at step 100 * (attempt - 1), 1000 s apart."""
    started = 1000.0 * attempt
    return {
        "attempt": attempt,
        "from_step": 100 * (attempt - 1),
        "reached": 0,
        "started": started,
        "time": started + at,
        "step": step,
        "seconds": seconds,
    }


FIRST = [
    line(1, 10, 0, starting=10.0),
    line(1, 60, 90, starting=10.0, compiling=20.0, training=30.0),
    # A save of the step that the second attempt goes on from, begun after a line of it.
    line(1, 70, 100, starting=10.0, compiling=20.0, training=40.0),
    line(1, 75, 100, starting=10.0, compiling=20.0, training=40.0, saving=5.0)
    | {"saved": True},
    line(1, 77, 100, starting=10.0, compiling=20.0, training=42.0, saving=5.0),
    # Killed after 20 more steps, and a wait for data.
    line(
        1, 90, 120, starting=10.0, compiling=20.0, training=50.0, saving=5.0, data=5.0
    ),
]
SECOND = [
    line(2, 20, 100, starting=15.0, restoring=5.0),
    line(2, 100, 200, starting=15.0, restoring=5.0, training=80.0),
]


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    text = "".join(f"{json.dumps(x)}\n" for x in lines)
    (folder / "attempts.jsonl").write_text(text)
    return folder


def test_lost_steps_count_once_and_the_categories_sum_to_the_attempts(tmp_path):
    found = read_goodput(write(tmp_path, *FIRST, *SECOND))
    assert found is not None
    assert found.seconds == {
        "training": 120.0,  # 40 until the save, and 80
        "starting": 25.0,
        "compiling": 20.0,
        "lost": 15.0,  # the last 10 of training, 5 of waiting
        "saving": 5.0,
        "restoring": 5.0,
    }
    assert found.total == 90 + 100
    assert (found.attempts, found.lost_steps, found.down) == (2, 20, 1000 - 90)
    assert str(found) == (
        "of 3 min in 2 attempts, 63% was training; 13% starting, 11% compiling, "
        "8% lost and repeated after a failure (20 steps), 3% saving, 3% restoring; "
        "15 min down between attempts"
    )


def test_a_run_that_went_on_without_a_loss_lost_nothing(tmp_path):
    found = read_goodput(write(tmp_path, *FIRST[:4], *SECOND))
    assert found is not None
    assert (found.lost_steps, found.seconds["training"]) == (0, 120.0)
    assert "lost" not in found.seconds


def test_lost_steps_are_those_that_have_metrics_also_after_the_last_line(tmp_path):
    second = [x | {"reached": 131} for x in SECOND]
    found = read_goodput(write(tmp_path, *FIRST, *second))
    assert found is not None
    assert (found.lost_steps, found.seconds["lost"], found.total) == (31, 15, 190)
    found = read_goodput(write(tmp_path, *FIRST[:2], *second))  # no line of the save
    assert found is not None
    assert (found.lost_steps, found.total) == (31, 60 + 100)


def test_a_run_that_goes_back_further_loses_parts_of_each_attempt(tmp_path):
    back = [line(3, 50, 200, starting=10.0, training=40.0) | {"from_step": 90}]
    found = read_goodput(write(tmp_path, *FIRST, *SECOND, *back))
    assert found is not None
    # The first from step 90 on, the second altogether; what starting took is not lost.
    assert found.seconds["lost"] == (20 + 5 + 5) + 80
    assert found.seconds["training"] == 30 + 40
    assert found.lost_steps == 30 + 100
    assert found.total == 90 + 100 + 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempt": "1"}, {"step": -1}, {"time": None}, {"seconds": 3},
        {"seconds": {"training": "x"}}, {"seconds": {"<b>": None}},
        {"seconds": {"training": 1e300}}, {"from_step": 7},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_line_is_left_out_and_named(wrong, tmp_path):
    left_out: list[str] = []
    found = read_goodput(
        write(tmp_path, *FIRST, FIRST[-1] | wrong, *SECOND), left_out.append
    )
    assert left_out == ["attempts.jsonl, line 7: it is no account of an attempt"]
    assert found == read_goodput(write(tmp_path, *FIRST, *SECOND))


def test_seconds_of_a_category_without_a_name_here_are_other_and_are_not_lost(tmp_path):
    newer = line(1, 50, 9, training=30.0, replaying=15.0, cooling=5.0)
    left_out: list[str] = []
    found = read_goodput(write(tmp_path, newer), left_out.append)
    assert found is not None
    assert (found.seconds, left_out) == ({"training": 30.0, "other": 20.0}, [])
    assert str(found) == "of 50 s in 1 attempt, 60% was training; 40% other"


def test_half_a_line_at_the_end_is_no_damage(tmp_path):
    file = write(tmp_path, *FIRST) / "attempts.jsonl"
    whole = read_goodput(tmp_path)
    file.write_text(file.read_text() + json.dumps(SECOND[0])[:50])
    left_out: list[str] = []
    assert read_goodput(tmp_path, left_out.append) == whole
    assert (left_out, newest_attempt(tmp_path)) == ([], 1)


def test_the_report_has_a_bar_and_a_table_of_all_categories(tmp_path):
    write_report(write(tmp_path, *FIRST, *SECOND))
    page = Page((tmp_path / "report.html").read_text())
    assert "Where the time went" in page.text["h2"]
    widths = [
        float(attributes["style"].removeprefix("width:").removesuffix("%"))
        for tag, attributes in page.elements
        if tag == "i" and "style" in attributes
    ]
    assert len(widths) == 6
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert "lost and repeated after a failure (20 steps)" in page.text["th"]
    assert "63.2%" in page.text["td"]
    write_report(tmp_path, up_to=150)
    page = Page((tmp_path / "report.html").read_text())
    assert "Where the time went" not in page.text["h2"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3599, "1 h"), (7800, "2 h 10 min")],
)
def test_a_duration_is_short_words(seconds, text):
    assert format_long(seconds) == text
