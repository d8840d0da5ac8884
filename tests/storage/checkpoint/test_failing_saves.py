"""Saves that fail: in one line each, and the next one is whole."""

import contextlib
import errno
import logging
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jshard
from checkpoints import at_step, check_equal, remount, small_disk
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.participants import Participants


def test_a_full_disk_fails_one_save_in_one_line_and_the_next_one_is_saved(
    state, abstract, tmp_path, capfd, caplog
):
    reports: list[Save] = []
    with small_disk(tmp_path / "disk", "700k") as disk:
        with Checkpointer(disk / "checkpoints", report=reports.append) as checkpointer:
            checkpointer.save(at_step(state, 1))
            checkpointer.wait()
            (disk / "other").write_bytes(bytes(free_bytes(disk) - 20_000))
            checkpointer.save(at_step(state, 2))
            checkpointer.wait()
            assert checkpointer.steps() == [1]
            assert [p.name for p in checkpointer.folder.iterdir()] == ["1"]
            (disk / "other").unlink()
            checkpointer.save(at_step(state, 3))
        assert [bool(save.error) for save in reports] == [False, True, False]
        assert "No space left on device" in reports[1].error
        assert "\n" not in reports[1].error
        check_equal(checkpointer.restore(abstract), at_step(state, 3))
    assert capfd.readouterr().err == ""
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_writes_that_end_after_a_failed_save_say_nothing_and_others_do(
    tmp_path, monkeypatch
):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    Checkpointer(tmp_path)
    hook = sys.unraisablehook
    Checkpointer(tmp_path)
    assert sys.unraisablehook is hook  # installed once
    for error in (RuntimeError("Event loop is closed"), RuntimeError("another")):
        hook(SimpleNamespace(exc_value=error))  # pyright: ignore[reportArgumentType]
    assert [str(u.exc_value) for u in heard] == ["another"]


def test_writes_that_outlive_a_failed_save_leave_nothing(state, tmp_path, monkeypatch):
    writing: list[threading.Thread] = []

    def fail_and_go_on(group: Participants, response: Any) -> None:
        response.result()
        folder = tmp_path / "1.saving"

        def write() -> None:  # as TensorStore's threads do, which make folders, too
            for i in range(40):
                (folder / "state" / str(i)).mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # removed in between
                    (folder / "state" / str(i) / "d").write_bytes(bytes(9))
                time.sleep(0.01)

        writing.append(threading.Thread(target=write))
        writing[0].start()
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(Participants, "wait_for", fail_and_go_on)
        checkpointer.save(at_step(state, 1))
    writing[0].join()
    assert list(tmp_path.iterdir()) == []


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def test_a_read_only_disk_fails_saves_in_one_line_each(
    state, abstract, tmp_path, capfd
):
    reports: list[Save] = []
    with small_disk(tmp_path / "disk", "4m") as disk:
        with Checkpointer(disk, report=reports.append) as checkpointer:
            checkpointer.save(at_step(state, 1))
            checkpointer.wait()
            remount(disk, "ro")
            checkpointer.save(at_step(state, 2))
            checkpointer.wait()
            check_equal(checkpointer.restore(abstract), at_step(state, 1))
            remount(disk, "rw")
            checkpointer.save(at_step(state, 3))
        assert checkpointer.steps() == [1, 3]
    assert [bool(save.error) for save in reports] == [False, True, False]
    assert "Read-only file system" in reports[1].error
    assert capfd.readouterr().err == ""


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(jshard.UserError, match=r"cannot write checkpoints to .*file"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_a_failed_save_is_logged_where_nobody_else_reports_it(tmp_path, state, caplog):
    with Checkpointer(tmp_path / "c") as checkpointer:
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "c").touch()
        checkpointer.save(state)
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("checkpoint of step 1 failed: ")
