"""Which step several processes start from, as each of them finds it."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jshard.storage.checkpoint import manifest, restore
from jshard.system.errors import UserError


@pytest.fixture
def several(monkeypatch):
    """Makes this one of three processes; returns what it hears from them, to be set."""
    heard = SimpleNamespace(first=None, all=None)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(
        restore.multihost_utils,
        "broadcast_one_to_all",
        lambda x: x if heard.first is None else heard.first,
    )
    monkeypatch.setattr(
        restore.multihost_utils,
        "process_allgather",
        lambda x: np.asarray([x] * 3 if heard.all is None else heard.all),
    )
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(restore, "time", clock)
    heard.slept = slept
    return heard


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
        manifest.write(folder / name, manifest.checksum(folder / name, "file"))


def test_the_newest_steps_are_those_that_process_0_sees(several, tmp_path):
    make(tmp_path, "0", "3", "5.replaced")
    found = [path.name for path in restore._steps_on_first(tmp_path)]
    assert found == ["0", "3", "5.replaced"]
    several.first = np.asarray([[7, 0], [9, 1], [-1, -1]], np.int32)
    found = [path.name for path in restore._steps_on_first(tmp_path)]
    assert found == ["7", "9.replaced"]


def test_no_more_than_64_steps_are_looked_at(tmp_path):
    for step in range(70):
        (tmp_path / f"{step}").mkdir()
    found = [int(path.name) for path in restore._steps_on_first(tmp_path)]
    assert found == list(range(6, 70))


def test_damage_that_another_process_finds_is_known_here(several, tmp_path):
    make(tmp_path, "3")
    several.all = [0, 0, 0]
    assert restore.find_damage(tmp_path / "3") == ""
    several.all = [0, 0, 2]
    said = "process 2 found damaged files"
    assert restore.find_damage(tmp_path / "3") == said
    (tmp_path / "3/file").unlink()
    assert restore.find_damage(tmp_path / "3") == "file is missing"


def test_a_process_alone_asks_nobody(tmp_path, monkeypatch):
    make(tmp_path, "3")

    def refuse(x):
        raise AssertionError("asked")

    monkeypatch.setattr(restore.multihost_utils, "process_allgather", refuse)
    assert restore.find_damage(tmp_path / "3") == ""
    assert restore.find_newest(tmp_path) == tmp_path / "3"
    assert restore.find_newest(tmp_path / "nothing") is None


def test_at_most_three_problems_are_listed(tmp_path):
    (tmp_path / "3").mkdir()
    files = {f"{i}": {"bytes": 1, "xxh3": ""} for i in range(6)}
    manifest.write(tmp_path / "3", files)
    said = restore.find_damage(tmp_path / "3")
    assert said == "0 is missing, 1 is missing, 2 is missing and 3 more"


def test_a_step_that_a_network_shows_late_is_waited_for(several, tmp_path, monkeypatch):
    make(tmp_path, "3")
    seen = itertools.chain([True, False, False, True], itertools.repeat(True))
    monkeypatch.setattr(Path, "exists", lambda self: next(seen))
    restore.wait_until_seen(tmp_path / "3")
    assert several.slept == [0.1, 0.1]


def test_a_step_that_a_process_does_not_see_is_refused_after_a_while(several, tmp_path):
    several.first, several.all = np.int32(1), [1, 0, 1]
    with pytest.raises(UserError, match="process 1 does not see checkpoint"):
        restore.wait_until_seen(tmp_path / "3")
    assert sum(several.slept) == pytest.approx(30.0, abs=0.11)
    several.slept.clear()
    several.first = np.int32(0)  # process 0 does not see it: it is damaged for all
    restore.wait_until_seen(tmp_path / "3")
    assert several.slept == []


def test_the_newest_that_is_whole_is_taken_and_a_path_may_be_a_step(tmp_path):
    make(tmp_path / "checkpoints", "2", "3", "4")
    (tmp_path / "checkpoints/4/file").unlink()
    told = r"^step 4 is damaged: file is missing \(in .*\): step 3 is used instead$"
    for path in (tmp_path, tmp_path / "checkpoints"):
        with pytest.warns(UserWarning, match=told):
            assert restore.find_step(path).name == "3"
    assert restore.find_step(tmp_path / "checkpoints/2").name == "2"
    with pytest.raises(UserError, match="4 is damaged: file is missing"):
        restore.find_step(tmp_path / "checkpoints/4")
    (tmp_path / "old/state").mkdir(parents=True)
    assert restore.is_step(tmp_path / "old")
    assert restore.is_step(tmp_path / "checkpoints/3")
    assert not restore.is_step(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        restore.find_step(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        restore.find_step(tmp_path / "empty")
    with pytest.raises(UserError, match="no checkpoint in"):
        restore.newest_intact(tmp_path / "empty")
