"""The files of local copies: labelled last, reused, and taken from no other user."""

import json
import os
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from jshard.storage.checkpoint.local import copy_files
from jshard.storage.checkpoint.local.copy_files import Label
from jshard.storage.checkpoint.local.pieces import Piece
from jshard.system.errors import UserError


def label(owner: int = 0, step: int = 3, size: int = 4) -> Label:
    return Label("it", 1, "digest", owner, step, size, [5, 6], {"notes": "x"})


def copy(folder: Path, owner: int, step: int, content: bytes) -> Label:
    """Makes a whole copy."""
    with copy_files.create(folder, owner, step, len(content)) as file:
        copy_files.write(file, 0, np.frombuffer(content, np.uint8))
    made = label(owner, step, len(content))
    copy_files.seal(folder, made)
    return made


def test_a_label_is_read_as_it_was_written():
    assert Label.read(label().text()) == label()
    with pytest.raises(ValueError, match="no label of a local copy"):
        Label.read('{"run": "it"}')


def test_a_folder_is_a_users_own_and_named_after_the_run(tmp_path):
    folder = copy_files.make_folder(tmp_path, "/runs/a")
    assert folder.name.startswith(f"jshard-{os.getuid()}-")
    assert len(folder.name.rpartition("-")[2]) == 12
    assert folder.stat().st_mode & 0o777 == 0o700
    assert copy_files.make_folder(tmp_path, "/runs/a") == folder
    assert copy_files.make_folder(tmp_path, "/runs/b") != folder
    with pytest.raises(UserError, match=r"cannot make .*: No such file"):
        copy_files.make_folder(tmp_path / "nowhere", "/runs/a")


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    copy_files.make_folder(tmp_path, "/runs/a")
    user = os.getuid()
    (tmp_path / f"jshard-{user + 1}-").mkdir()
    (folder,) = tmp_path.glob(f"jshard-{user}-*")
    folder.rename(tmp_path / folder.name.replace(f"-{user}-", f"-{user + 1}-"))
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(UserError, match="is another user's: give another folder"):
        copy_files.make_folder(tmp_path, "/runs/a")


def test_only_folders_without_a_copy_for_a_day_are_removed(tmp_path):
    now = time.time()
    own = copy_files.make_folder(tmp_path, "/runs/a")
    ages = {"old": 86_500.0, "new": 86_300.0, "used": 90_000.0}
    for name, age in ages.items():
        folder = tmp_path / f"jshard-{os.getuid()}-{name}"
        (folder / "0").mkdir(parents=True)
        if name != "used":
            os.utime(folder / "0", (now - age, now - age))
        os.utime(folder, (now - age, now - age))
    os.utime(own, (now - 90_000.0, now - 90_000.0))
    copy_files.make_folder(tmp_path, "/runs/a")
    left = {path.name.rpartition("-")[2] for path in tmp_path.iterdir()}
    assert left == {"new", "used", own.name.rpartition("-")[2]}


def test_a_copy_takes_over_the_pages_of_one_that_is_dropped(tmp_path):
    copy(tmp_path, 0, 3, b"12345678")
    inode = (tmp_path / "0/3.bytes").stat().st_ino
    copy_files.drop(tmp_path, 0, 3, reuse=True)
    assert [path.name for path in tmp_path.glob("0/*")] == ["spare"]
    copy(tmp_path, 0, 4, b"abcd")
    assert (tmp_path / "0/4.bytes").stat().st_ino == inode
    assert bytes(copy_files.read(tmp_path, 0, 4)) == b"abcd"
    copy_files.drop(tmp_path, 0, 4)
    assert list(tmp_path.glob("0/*")) == []
    copy_files.drop(tmp_path, 0, 4)  # another has removed it
    copy_files.drop(tmp_path, 0, 4, reuse=True)


def test_bytes_are_written_where_they_belong_however_few_at_a_time(
    tmp_path, monkeypatch
):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:3], at))
    with copy_files.create(tmp_path, 0, 3, 12) as file:
        copy_files.write(file, 4, np.arange(1, 9, dtype=np.uint8))
    there = copy_files.read(tmp_path, 0, 3)
    assert there.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_copy_may_be_empty(tmp_path):
    copy(tmp_path, 2, 3, b"")
    assert copy_files.read(tmp_path, 2, 3).shape == (0,)
    assert [found.owner for found in copy_files.labels(tmp_path)] == [2]


def test_each_whole_piece_has_a_checksum():
    data = np.arange(10, dtype=np.uint8)
    pieces = [Piece(0, 4), Piece(4, 6), Piece(8, 3)]
    wanted = [zlib.crc32(data[:4].tobytes()), zlib.crc32(data[4:10].tobytes())]
    assert copy_files.sums(data, pieces) == wanted


def test_only_whole_copies_have_labels_that_count(tmp_path):
    copy(tmp_path, 1, 5, b"abcd")
    wanted = copy(tmp_path, 0, 10, b"1234")
    os.truncate(tmp_path / "1/5.bytes", 3)
    for number, text in ((6, "[]"), (7, label(1, 8).text()), (8, "{")):
        (tmp_path / f"1/{number}.json").write_text(text)
        (tmp_path / f"1/{number}.bytes").write_bytes(b"1234")
    (tmp_path / "1/9.json").write_text(label(1, 9).text())  # without bytes
    assert copy_files.listed(tmp_path) == [
        (0, 10),
        (1, 5),
        (1, 6),
        (1, 7),
        (1, 8),
        (1, 9),
    ]
    assert copy_files.labels(tmp_path) == [wanted]
    copy_files.tidy(tmp_path, [wanted])
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["10.bytes", "10.json"]
    assert copy_files.used(tmp_path) == 4 + len(wanted.text())


def test_a_tidied_folder_keeps_the_texts(tmp_path):
    place = copy_files.unpack(tmp_path, 1, {"config.json": json.dumps({"a": "ä"})})
    assert (place / "config.json").read_bytes() == b'{"a": "\\u00e4"}'
    copy_files.tidy(tmp_path, [])
    assert place.is_dir()
    again = copy_files.unpack(tmp_path, 1, {"notes": "ä"})
    assert [path.name for path in again.iterdir()] == ["notes"]
    assert (again / "notes").read_bytes() == "ä".encode()
