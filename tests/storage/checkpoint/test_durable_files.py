"""A file gets its name once its contents are on the disk, for a power cut after it."""

import os
from pathlib import Path

import pytest

from checkpoints import save_steps
from jshard.system.files.atomic import replace_file, replacing


class Disk:
    """What would be left after a power cut: bytes and names that were synced.

    Attributes:
      synced: The bytes of each file that are on the disk, by inode.
      pending: Renames whose folder was not synced since.
      renamed: All renames, as (source, destination).
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.synced: dict[int, int] = {}
        self.pending: set[Path] = set()
        self.renamed: list[tuple[Path, Path]] = []
        self._fsync = os.fsync
        patch.setattr(os, "fsync", self.fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._recording(getattr(os, name)))

    def fsync(self, file: int) -> None:
        self._fsync(file)
        stat = os.fstat(file)
        self.synced[stat.st_ino] = stat.st_size
        place = Path(os.readlink(f"/proc/self/fd/{file}"))
        self.pending = {path for path in self.pending if path.parent != place}

    def _recording(self, move):
        def recorded(source, destination, **options) -> None:
            source, destination = Path(source), Path(destination)
            if source.is_file():
                stat = source.stat()
                assert self.synced.get(stat.st_ino) == stat.st_size, source
            move(source, destination, **options)
            self.renamed.append((source, destination))
            self.pending.add(destination)

        return recorded

    def moved_to(self, folder: Path) -> list[str]:
        return [there.name for _, there in self.renamed if there.parent == folder]


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def test_a_replaced_file_is_synced_before_its_name_and_the_name_after(disk, tmp_path):
    (tmp_path / "notes.json").write_text("old")
    replace_file(tmp_path / "notes.json", "new text")
    assert disk.moved_to(tmp_path) == ["notes.json"]
    assert (tmp_path / "notes.json").read_text() == "new text"
    assert disk.pending == set()


def test_a_file_of_tokens_is_synced_before_its_name_and_the_name_after(disk, tmp_path):
    with replacing(tmp_path / "tokens.bin") as stream:
        stream.write(b"tokens")
    assert disk.moved_to(tmp_path) == ["tokens.bin"]
    assert disk.pending == set()


def test_a_checkpoint_is_synced_before_its_name_and_the_name_after(
    disk, state, tmp_path
):
    save_steps(tmp_path / "checkpoints", state, 1)
    assert disk.moved_to(tmp_path / "checkpoints") == ["1"]
    built = tmp_path / "checkpoints" / "1.saving"
    assert {"description.json", "manifest.json"} <= set(disk.moved_to(built))
    assert disk.pending == set()
