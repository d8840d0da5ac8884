"""The local copy of what is small in a bucket follows it, and is whole or none."""

import shutil
import tempfile
from pathlib import Path

import pytest

from bucket_steps import Written
from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.buckets import mirror, step_list
from jshard.storage.checkpoint.buckets.objects import BucketError, Objects
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import UserError


def test_a_run_is_copied_without_its_arrays(there, tmp_path):
    for name in ("config.json", "metrics.jsonl", "samples/1.png", "other"):
        there.write(name, name.encode())
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("changed here")
    assert not mirror.fetch_run(there, run)
    assert (run / "config.json").read_text() == "changed here"
    assert (run / "samples/1.png").read_text() == "samples/1.png"
    assert sorted(p.name for p in run.iterdir()) == [
        "config.json", "metrics.jsonl", "samples",
    ]  # fmt: skip
    Written(there.below("checkpoints"), tmp_path / "c").save(2)
    assert mirror.fetch_run(there, run)
    assert find_steps(run / "checkpoints") == [2]
    assert sorted(p.name for p in (run / "checkpoints/2").iterdir()) == [
        ".bucket", "description.json", "manifest.json", "notes.txt",
    ]  # fmt: skip


def test_a_local_copy_follows_the_bucket(there, tmp_path):
    written = Written(there, tmp_path / "c")
    written.save(1)
    local = tmp_path / "local"
    assert mirror.fetch_steps(there, local)
    (local / "1/notes.txt").write_text("kept")
    written.save(2)
    assert mirror.fetch_steps(there, local)
    assert find_steps(local) == [1, 2]
    assert (local / "1/notes.txt").read_text() == "kept"  # it was complete
    written.save(1)
    mirror.fetch_steps(there, local)
    assert (local / "1/notes.txt").read_text() == "x"  # another attempt's
    written.save(3, lambda folders, newest: [1])
    mirror.fetch_steps(there, local)
    assert find_steps(local) == [2, 3]


def test_a_copy_that_was_interrupted_is_made_again(there, tmp_path):
    Written(there, tmp_path / "c").save(1)
    (tmp_path / "local/1").mkdir(parents=True)
    (tmp_path / "local/1/half").touch()
    mirror.fetch_steps(there, tmp_path / "local")
    assert not (tmp_path / "local/1/half").exists()
    assert (tmp_path / "local/1/notes.txt").exists()


def test_what_is_missing_in_a_step_is_left_for_who_restores_it(there, tmp_path):
    Written(there, tmp_path / "c").save(1)
    (name,) = step_list.read(there).values()
    there.below(name).delete("notes.txt")
    mirror.fetch_steps(there, tmp_path / "one")
    assert manifest.verify(tmp_path / "one/1") == ["notes.txt is missing"]
    there.below(name).write("manifest.json", b"{}")
    mirror.fetch_steps(there, tmp_path / "two")
    assert manifest.verify(tmp_path / "two/1") == ["manifest.json is damaged"]
    there.below(name).delete("manifest.json")
    mirror.fetch_steps(there, tmp_path / "three")
    assert [p.name for p in (tmp_path / "three/1").iterdir()] == [".bucket"]


def test_a_url_may_be_that_of_a_run_of_checkpoints_or_of_a_step(there, tmp_path):
    Written(there.below("checkpoints"), tmp_path / "c").save(12)
    assert find_steps(mirror.on_disk(there.url) / "checkpoints") == [12]
    checkpoints = there.below("checkpoints")
    assert find_steps(mirror.on_disk(checkpoints.url)) == [12]
    (name,) = step_list.read(checkpoints).values()
    step = mirror.on_disk(checkpoints.below(name).url)
    assert step.name == "12"
    assert manifest.verify(step) == []
    with pytest.raises(UserError, match="/nothing holds no checkpoint"):
        mirror.on_disk(f"{there.url}/nothing")
    assert mirror.on_disk("~/a") == Path("~/a").expanduser()


@pytest.mark.parametrize("name", ["..", ".", "-12", "..-ab"])
def test_no_folder_but_its_own_is_emptied_for_a_step(name, monkeypatch):
    emptied = []
    monkeypatch.setattr(
        mirror, "_fetch_step", lambda step, local: emptied.append(local)
    )
    monkeypatch.setattr(Objects, "read", lambda self, path: (b"{}", b""))
    with pytest.raises(UserError, match="is not the name of a file in the folder"):
        mirror.on_disk(f"s3://bucket/run/{name}")
    assert emptied == []
    step = mirror.on_disk("s3://bucket/run/12-ab/")
    assert emptied == [step]
    assert step.name == "12"
    assert step.parent.name.startswith("jshard-s3-bucket-run-12-ab-")


def test_what_cannot_be_fetched_is_told(there, tmp_path, monkeypatch):
    Written(there, tmp_path / "c").save(1)

    def refuse(step: Objects, local: Path) -> None:
        raise BucketError("access denied", step.url)

    monkeypatch.setattr(mirror, "_fetch_step", refuse)
    with pytest.raises(BucketError, match="access denied"):
        mirror.fetch_steps(there, tmp_path / "local")


def test_a_temporary_folder_is_named_after_its_url():
    folder = mirror.temporary_folder("s3://b/" + "x" * 200)
    assert folder.name.startswith(f"jshard-s3-b-{'x' * 95}-")
    assert folder.is_dir()
    shutil.rmtree(folder)


def test_folders_of_killed_processes_are_deleted_and_those_in_use_and_others_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "jshard-of-a-user").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".in-use").touch()
    (tmp_path / "jshard-link").symlink_to(elsewhere)
    killed = tmp_path / "jshard-s3-b-x-killed"
    killed.mkdir()
    (killed / ".in-use").touch()  # which the kernel unlocked
    first = mirror.temporary_folder("s3://b/y")
    mirror.temporary_folder("s3://b/z")
    assert not killed.exists()
    assert first.is_dir()
    assert (tmp_path / "jshard-of-a-user").is_dir()
    assert (elsewhere / ".in-use").exists()


@pytest.mark.parametrize(
    "key",
    ["samples/../../evil", "samples//etc/evil", "samples/a\nb", "samples/" + 300 * "x"],
)
def test_no_key_of_a_bucket_is_written_outside_of_the_copy(
    key, there, tmp_path, monkeypatch
):
    monkeypatch.setattr(Objects, "paths", lambda self, prefix: [key])
    monkeypatch.setattr(Objects, "read", lambda self, name: (b"evil", None))
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    with pytest.raises(UserError, match=r"^s3:\S+: ") as error:
        mirror.fetch_run(there, run)
    assert "\n" not in str(error.value)
    assert not [p for p in tmp_path.rglob("*") if "evil" in p.name]
