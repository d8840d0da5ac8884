"""A step in a bucket is named when it is complete, by the run that started last.

No server is needed: TensorStore's objects are files here, which it writes conditionally
as it does objects.
"""

import json
import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from bucket_steps import Written
from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.buckets import step_list
from jshard.storage.checkpoint.buckets.objects import BucketError, Objects, Overtaken
from jshard.storage.checkpoint.buckets.saves import BucketSaves
from jshard.storage.checkpoint.buckets.step_list import StepList
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import UserError


def steps_of(there: Objects) -> list[int]:
    return [*step_list.read(there)]


# The order of writes.


def test_a_step_is_named_after_all_its_files_are_there(there, tmp_path, monkeypatch):
    writes = []
    for name in ("write", "replace"):
        method = getattr(Objects, name)

        def recorded(self, path, *args, method=method, **kwargs):
            writes.append(path)
            return method(self, path, *args, **kwargs)

        monkeypatch.setattr(Objects, name, recorded)
    Written(there, tmp_path).save(3)
    assert writes == [
        "steps.json",  # whose owner this run becomes
        "description.json", "notes.txt", "manifest.json",
        "steps.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["description.json", "manifest.json"])
def test_a_step_whose_files_cannot_be_written_is_not_named(
    name, there, tmp_path, monkeypatch
):
    written = Written(there, tmp_path)
    written.save(1)
    write = Objects.write

    def refuse(self, path, content):
        if path == name:
            raise BucketError("access denied", self.url)
        write(self, path, content)

    monkeypatch.setattr(Objects, "write", refuse)
    with pytest.raises(BucketError):
        written.save(2)
    assert steps_of(there) == [1]
    assert find_steps(tmp_path) == [1]
    written.saves.give_up()  # its objects are deleted by the next save
    monkeypatch.undo()


def test_what_another_program_keeps_beside_the_steps_is_not_deleted(there, tmp_path):
    StepList(there)
    for path in ("ckpt-8/_METADATA", "8-best/_METADATA", "8-0123abcd/left"):
        there.write(path, b"{}")
    Written(there, tmp_path)
    assert {*there.paths()} == {"ckpt-8/_METADATA", "8-best/_METADATA", "steps.json"}


def test_a_step_leaves_the_list_before_its_objects(there, tmp_path, monkeypatch):
    written = Written(there, tmp_path)
    written.save(1)
    delete, left = Objects.delete, []

    def recorded(self, below):
        left.append((below.partition("-")[0], steps_of(there)))
        delete(self, below)

    monkeypatch.setattr(Objects, "delete", recorded)
    written.save(2, lambda folders, newest: sorted({*folders} - {newest}))
    assert left == [("1", [2])]
    assert find_steps(tmp_path) == [2]
    assert {path.partition("-")[0] for path in there.paths()} == {"2", "steps.json"}


def test_what_could_not_be_deleted_is_deleted_later(
    there, tmp_path, monkeypatch, caplog
):
    written = Written(there, tmp_path)
    written.save(1)
    with monkeypatch.context() as patch:

        def refuse(self, below):
            raise BucketError("access denied", self.url)

        patch.setattr(Objects, "delete", refuse)
        written.save(2, lambda folders, newest: [1])
    assert "cannot delete: " in caplog.text
    assert "access denied" in caplog.text
    assert {path.partition("-")[0] for path in there.paths()} == {
        "1",
        "2",
        "steps.json",
    }
    written.save(3)
    assert {path.partition("-")[0] for path in there.paths()} == {
        "2",
        "3",
        "steps.json",
    }
    assert written.saves._leftovers == set()


def test_a_save_starts_only_while_the_run_owns_the_list(there, tmp_path):
    written = Written(there, tmp_path / "first")
    Written(there, tmp_path / "second")
    with pytest.raises(Overtaken, match="another run, which was started later"):
        written.save(1)
    assert there.paths() == ["steps.json"]


def test_process_0_alone_asks_who_owns_the_list(there, tmp_path):
    written = Written(there, tmp_path / "first")
    Written(there, tmp_path / "second")
    started = written.saves.start(1, {"params.w": jnp.arange(6.0)}, {})
    group: Any = SimpleNamespace(index=1, count=2)
    assert written.saves.write(started, group)["bytes"] == 24


def test_a_save_tells_its_bytes_and_what_identifies_its_objects(there, tmp_path):
    size = Written(there, tmp_path).save(4)
    (name,) = step_list.read(there).values()
    assert re.fullmatch("4-[0-9a-f]{8}", name)
    files = manifest.read(tmp_path / "4")
    assert {*files} == {"description.json", "notes.txt"}
    about = manifest.read_arrays(tmp_path / "4")
    assert about["bytes"] == 6 * 4 + 2 * 4
    assert size == 32 + sum(file["bytes"] for file in files.values())
    assert about["url"] == f"{there.url}/{name}"
    found = there.below(name).paths("state/")
    assert about["objects"] == there.below(name).generations(found)
    assert (tmp_path / "4/.bucket").read_text() == about["url"]


def test_an_attempt_that_was_killed_on_this_host_is_begun_again(there, tmp_path):
    (tmp_path / "5.saving").mkdir()
    (tmp_path / "5.saving/other.json").touch()
    Written(there, tmp_path / "new/folder").save(4)
    Written(there, tmp_path).save(5)
    assert not (tmp_path / "5/other.json").exists()


def test_objects_beside_the_steps_are_left_alone(there, tmp_path):
    StepList(there)
    for name in ("notes/a", "7-0123abcd/state/d/x"):
        there.write(name, b"x")
    Written(there, tmp_path)
    assert sorted(there.paths()) == ["notes/a", "steps.json"]


def test_steps_without_their_list_are_kept_and_refused(there, tmp_path):
    Written(there, tmp_path / "first").save(6)
    there.delete("steps.json")
    kept = there.paths()
    for start in (step_list.read, StepList):
        with pytest.raises(
            UserError, match=r"steps\.json is missing, .* of 6-[0-9a-f]"
        ):
            start(there)
    with pytest.raises(UserError, match="restore it, or give another URL"):
        Written(there, tmp_path / "second")
    assert there.paths() == kept


def test_a_second_start_reads_what_the_first_saved(there, tmp_path):
    Written(there, tmp_path / "first").save(6)
    again = BucketSaves(there.url, tmp_path / "second")
    assert find_steps(tmp_path / "second") == [6]
    assert {path.partition("-")[0] for path in there.paths()} == {"6", "steps.json"}
    again.refresh()
    assert find_steps(tmp_path / "second") == [6]


# The list and its owner.


def test_a_list_that_another_run_takes_meanwhile_is_not_replaced(there):
    first = StepList(there)

    def changed(names):
        StepList(there).change(lambda names: {7: "7-ab"})
        return {1: "1-cd"}

    with pytest.raises(Overtaken, match="replaced by another process"):
        first.change(changed)
    assert step_list.read(there) == {7: "7-ab"}


def test_a_start_becomes_the_owner_while_another_run_saves(there, monkeypatch):
    first = StepList(there)
    replace, others = Objects.replace, [{2: "2-ab"}, {3: "3-cd"}]

    def late(self, path, content, instead_of):
        if others:
            names = others.pop(0)
            with monkeypatch.context() as patch:
                patch.setattr(Objects, "replace", replace)
                first.change(lambda _: names)
        replace(self, path, content, instead_of)

    monkeypatch.setattr(Objects, "replace", late)
    assert StepList(there).names == {3: "3-cd"}
    with pytest.raises(Overtaken):
        first.check()


def test_who_saves_is_who_became_the_owner_at_the_start(there, tmp_path):
    claimed = StepList(there).owner
    BucketSaves(there.url, tmp_path / "here", claimed)
    StepList(there)
    with pytest.raises(Overtaken, match="another run, which was started later"):
        BucketSaves(there.url, tmp_path / "here", claimed)


def test_the_list_is_sorted_and_every_write_of_it_is_another(there, monkeypatch):
    written = []
    replace = Objects.replace

    def recorded(self, path, content, instead_of):
        written.append(content)
        replace(self, path, content, instead_of)

    monkeypatch.setattr(Objects, "replace", recorded)
    names = {20: "20-ab", 3: "3-cd"}
    ours = StepList(there)
    assert ours.names == {}
    ours.change(lambda _: names)
    before, after = ours.change(lambda _: names)
    assert (before, after) == (names, names)
    first, second = map(json.loads, written[-2:])
    assert [*first["steps"]] == ["3", "20"]
    assert first["format"] == 1
    assert len(first["owner"]) == 16
    assert len(first["write"]) == 8
    assert first["write"] != second["write"]
    assert written[-1].startswith(b'{\n "format"')
    assert StepList(there).names == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is damaged: restore it"),
        ("[]", "is damaged: restore it"),
        ('{"format": 1, "owner": "x", "steps": []}', "is damaged: restore it"),
        ('{"format": 1, "owner": "x", "steps": {"1": "2-ab"}}', "names no folders"),
        ('{"format": 1, "owner": "x", "steps": {"1": 3}}', "names no folders"),
        ('{"format": 2, "owner": "x", "steps": {}}', "newer jshard: upgrade jshard"),
    ],
)
def test_a_list_that_is_none_is_one_line(text, said, there):
    there.write("steps.json", text.encode())
    with pytest.raises(UserError, match=said):
        step_list.read(there)
