"""Copies of what buckets hold, and what is uploaded: a folder stands for the bucket."""

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from jshard.storage.checkpoint.buckets import files
from jshard.storage.checkpoint.local import copy_files

URL = "s3://bucket/data"


class Bucket(DirFileSystem):
    """Tells names of objects as s3fs does, takes URLs, and counts what it sends."""

    def __init__(self, folder: Path):
        super().__init__(str(folder), LocalFileSystem(auto_mkdir=True))
        self.sent: list[str] = []

    def find(self, path: str, **options: Any) -> Any:
        return super().find(path.removeprefix("s3://"), **options)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self.sent.append(rpath)
        super().get_file(rpath, lpath, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self.sent.append(rpath.rpartition("/")[2])
        super().put_file(lpath, rpath.removeprefix("s3://"), **options)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("JSHARD_CACHE", str(tmp_path / "cache"))
    made = Bucket(tmp_path / "objects")
    monkeypatch.setattr(files, "_store", lambda url: made)
    return made


def test_a_copy_is_what_the_bucket_has_and_is_downloaded_once(bucket, tmp_path):
    there = tmp_path / "objects" / "bucket" / "data"
    (there / "sub").mkdir(parents=True)
    (there / "a.txt").write_text("one")
    (there / "sub" / "b.txt").write_text("two")
    copy = files.downloaded(URL)
    assert (copy / "a.txt").read_text() == "one"
    assert (copy / "sub" / "b.txt").read_text() == "two"
    assert sorted(bucket.sent) == ["bucket/data/a.txt", "bucket/data/sub/b.txt"]
    bucket.sent.clear()
    assert files.downloaded(URL) == copy
    assert bucket.sent == []
    (there / "a.txt").write_text("another")
    (there / "sub" / "b.txt").unlink()
    files.downloaded(URL)
    assert bucket.sent == ["bucket/data/a.txt"]
    assert (copy / "a.txt").read_text() == "another"
    assert not (copy / "sub" / "b.txt").exists()


def test_the_file_that_names_the_others_is_uploaded_last(bucket, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    for name in ("index.json", "a.bin", "b.bin", ".hidden"):
        (folder / name).write_text(name)
    files.upload(folder, URL, "index.json")
    assert sorted(bucket.sent[:2]) == ["a.bin", "b.bin"]
    assert bucket.sent[2:] == ["index.json"]
    assert sorted(files.names_at(URL)) == ["a.bin", "b.bin", "index.json"]


def test_what_another_process_removes_meanwhile_is_gone_all_the_same(
    tmp_path, monkeypatch
):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "7.bytes").write_bytes(b"x")

    def is_file(path: Path) -> bool:
        path.unlink()
        return True

    monkeypatch.setattr(Path, "is_file", is_file)
    copy_files.tidy(tmp_path, [])
    assert not [*tmp_path.glob("*/*")]
