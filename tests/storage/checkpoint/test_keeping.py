"""Which steps are kept, and which of them is the best; which saves are refused."""

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jshard.storage.checkpoint import checkpointer as module
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save, log
from jshard.storage.checkpoint.metadata import FILE
from jshard.system.errors import UserError


def expired(
    folder: Path, steps: dict[int, float | None], newest: int, saved=None, **options
):
    """The steps to delete of those with these losses, and times if they have any."""
    folders, saved = {}, saved or {}
    for step, loss in steps.items():
        folders[step] = folder / f"{step}"
        folders[step].mkdir(exist_ok=True)
        metrics = {} if loss is None else {"loss": loss}
        about = {
            "step": step, "processes": 1, "stacks": [], "versions": {},
            "created": saved.get(step, ""),
            "mesh": {}, "metrics": metrics, "config": {}, "arrays": {},
        }  # fmt: skip
        (folders[step] / FILE).write_text(json.dumps(about))
    return Checkpointer(folder, **options)._expired(folders, newest)


LOSSES = {1: 3.0, 2: 0.5, 3: 2.0, 4: 0.7, 6: None, 8: 9.0}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({}, [1, 2, 3]),
        ({"keep": 1}, [1, 2, 3, 4, 6]),
        ({"keep": 2}, [1, 2, 3, 4]),
        ({"keep": 9}, []),
        ({"keep": 1, "keep_every": 3}, [1, 2, 4]),
        ({"keep": 1, "keep_every": 1}, []),
        ({"keep": 1, "best": "loss"}, [1, 3, 4, 6]),
        ({"keep": 1, "best": "loss", "highest": True}, [1, 2, 3, 4, 6]),
        ({"keep": 1, "best": "accuracy"}, [1, 2, 3, 4, 6]),
        ({"keep": 1, "keep_every": 4, "best": "loss"}, [1, 3, 6]),
    ],
    ids=str,
)
def test_the_last_the_regular_and_the_best_stay(options, gone, tmp_path):
    assert expired(tmp_path, LOSSES, 8, **options) == gone


def test_one_step_of_each_period_of_hours_stays_also_over_several_deletions(tmp_path):
    start = datetime(2026, 3, 29, tzinfo=UTC)
    there, options = {}, {"keep": 2, "keep_hours": 1.5}
    for step in range(1, 13):  # one each half hour; the fifth says nothing of its time
        there[step] = None
        saved = {i: (start + i * timedelta(minutes=30)).isoformat() for i in there}
        saved[5] = "noon"
        for gone in expired(tmp_path, there, step, saved, **options):
            del there[gone]
    assert [*there] == [1, 4, 7, 10, 11, 12]


def test_hours_longer_than_any_run_keep_the_first_step_alone(tmp_path):
    saved = {1: "2026-03-29T00:00:00", 2: "2026-03-30T00:00:00+00:00"}  # by other hands
    there: dict[int, float | None] = {1: None, 2: None, 3: None}
    assert expired(tmp_path, there, 3, saved, keep=1, keep_hours=1e300) == [2]


def test_later_steps_of_a_run_that_went_back_are_left_alone(tmp_path):
    assert expired(tmp_path, LOSSES, 3, keep=1) == [1, 2]
    assert expired(tmp_path, LOSSES, 3, keep=1, keep_every=2) == [1]


def test_a_step_whose_description_is_damaged_is_not_the_best(tmp_path):
    best = {"keep": 1, "best": "loss"}
    assert expired(tmp_path, {1: float("nan"), 2: 5.0, 3: 7.0}, 3, **best) == [1]
    (tmp_path / "2").rename(tmp_path / "other")
    folders = {step: tmp_path / f"{step}" for step in (1, 2, 3)}
    assert Checkpointer(tmp_path, **best)._expired(folders, 3) == [1, 2]


@pytest.mark.parametrize(
    ("options", "fine"),
    [
        ({"keep": 0}, False),
        ({"keep": 1}, True),
        ({"keep_every": -1}, False),
        ({"keep_every": 0}, True),
        ({"keep": 2, "keep_every": 1}, True),
        ({"keep_hours": -0.5}, False),
        ({"keep_hours": float("nan")}, False),
    ],
)
def test_what_keeps_nothing_is_refused(options, fine, tmp_path):
    if fine:
        Checkpointer(tmp_path, **options)
        return
    with pytest.raises(UserError, match="must be at least 1, and keep_every="):
        Checkpointer(tmp_path, **options)


def test_an_outcome_is_logged_and_cannot_be_changed(caplog):
    caplog.set_level(logging.INFO, logger="jshard")
    done = Save(3, 0.5, 1.25)
    assert (done.size, done.error, done.overtaken) == (0, "", False)
    with pytest.raises(AttributeError):
        done.step = 4  # pyright: ignore[reportAttributeAccessIssue]
    log(done)
    log(Save(4, 0.5, 1.0, error="no room"))
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.INFO, "checkpoint of step 3 saved in 1.2 s"),
        (logging.ERROR, "checkpoint of step 4 failed: no room"),
    ]


def test_a_folder_may_be_in_a_bucket(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        module, "BucketSaves", lambda url, local, owner: made.append((url, local))
    )
    there = Checkpointer("s3://bucket/run", local=tmp_path)
    assert there.folder == tmp_path
    assert made == [("s3://bucket/run", tmp_path)]
    with pytest.raises(UserError, match="folder=s3://bucket: must be like"):
        Checkpointer("s3://bucket")
    with pytest.raises(UserError, match="folder=http://x/y: is a URL"):
        Checkpointer("http://x/y")
