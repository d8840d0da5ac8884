"""The folders of steps: which there are, and how they are replaced and removed."""

import itertools
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jshard.storage.checkpoint import step_folders
from jshard.storage.checkpoint.step_folders import (
    delete,
    find_steps,
    give_up,
    put_in_place,
    step_folder,
    tidy,
)


def make(folder: Path, *names: str) -> None:
    """Folders that hold a file with their name in it."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "is").write_text(name)


def names(folder: Path) -> dict[str, str]:
    """The folders there, and which each of them was made as."""
    return {
        path.name: (path / "is").read_text()
        for path in folder.iterdir()
        if (path / "is").exists()
    }


def test_steps_are_whole_numbers_that_a_state_can_have(tmp_path):
    assert find_steps(tmp_path / "nothing") == []
    steps = ("0", "3", "10", str(2**31 - 1), "5.replaced")
    others = ("03", "-1", str(2**31), "1" * 11, "4.saving", "6.deleting", "x.replaced")
    make(tmp_path, *steps, *others)
    assert find_steps(tmp_path) == [0, 3, 5, 10, 2**31 - 1]


def test_a_step_that_was_replaced_is_where_it_is_while_nothing_took_its_place(tmp_path):
    make(tmp_path, "1", "2.replaced", "3", "3.replaced")
    assert step_folder(tmp_path, 1) == tmp_path / "1"
    assert step_folder(tmp_path, 2) == tmp_path / "2.replaced"
    assert step_folder(tmp_path, 3) == tmp_path / "3"
    assert step_folder(tmp_path, 4) == tmp_path / "4"


def test_a_step_takes_its_place_or_that_of_another(tmp_path):
    make(tmp_path, "1.saving", "2", "2.saving", "3.saving", "3.replaced")
    for step in (1, 2, 3):
        put_in_place(tmp_path / f"{step}.saving")
    assert names(tmp_path) == {f"{step}": f"{step}.saving" for step in (1, 2, 3)}


def test_what_takes_its_place_in_vain_loses_nothing(tmp_path, monkeypatch):
    make(tmp_path, "2", "2.saving")
    rename = Path.rename

    def refuse(self, target):
        if self.suffix == ".saving":
            raise OSError(5, "I/O error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="I/O error"):
        put_in_place(tmp_path / "2.saving")
    assert names(step_folder(tmp_path, 2).parent)["2.replaced"] == "2"
    assert find_steps(tmp_path) == [2]


def test_a_folder_to_delete_has_another_name_first(tmp_path, monkeypatch, caplog):
    make(tmp_path, "1", "2.replaced")
    removed = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: removed.append(path.name))
    delete(tmp_path / "1")
    delete(tmp_path / "2.replaced")
    assert removed == ["1.deleting", "2.deleting"]
    assert caplog.text == ""
    delete(tmp_path / "3")
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "cannot delete: " in caplog.text


def test_the_next_start_completes_or_removes_what_was_interrupted(tmp_path):
    make(
        tmp_path,
        "1", "1.replaced", "2.replaced", "3.saving", "4.deleting", "5", "6.saving",
        "x.saving", "x.replaced", "x.deleting", "7.other",
    )  # fmt: skip
    (tmp_path / "3.saving/state").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == {
        "1": "1", "2": "2.replaced", "5": "5",
        "x.saving": "x.saving", "x.replaced": "x.replaced",
        "x.deleting": "x.deleting", "7.other": "7.other",
    }  # fmt: skip


def test_what_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    make(tmp_path, "2.replaced", "3.saving", "4.deleting")

    def refuse(*args, **options):
        raise OSError(5, "I/O error")

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr("os.rmdir", refuse)
    monkeypatch.setattr("os.unlink", refuse)
    tidy(tmp_path)
    assert find_steps(tmp_path) == [2]
    give_up_at_once(monkeypatch)
    give_up(tmp_path / "3.saving")


def give_up_at_once(monkeypatch) -> list[float]:
    """Sets the clock of the folders; returns how long `give_up` slept each time."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(step_folders, "time", clock)
    return slept


def test_late_writes_to_a_failed_save_are_waited_for_while_they_come(
    tmp_path, monkeypatch
):
    slept = give_up_at_once(monkeypatch)
    make(tmp_path, "1", "2.saving")
    give_up(tmp_path / "2.saving")
    assert names(tmp_path) == {"1": "1"}
    assert set(slept) == {0.05}
    assert sum(slept) == pytest.approx(1.0, abs=0.06)

    writes = itertools.chain([True] * 30, itertools.repeat(False))

    def write_late(seconds: float) -> None:
        slept.append(seconds)
        if next(writes):
            (tmp_path / "2.saving/state").mkdir(parents=True)

    slept.clear()
    monkeypatch.setattr(step_folders.time, "sleep", write_late)
    give_up(tmp_path / "2.saving")
    assert names(tmp_path) == {"1": "1"}
    assert sum(slept) == pytest.approx(2.5, abs=0.11)

    writes = itertools.repeat(True)
    slept.clear()
    give_up(tmp_path / "2.saving")
    assert sum(slept) == pytest.approx(20.0, abs=0.06)
    assert names(tmp_path) == {"1": "1"}
