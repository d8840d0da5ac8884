"""The manifest of a step: who verifies which files, and what is no manifest."""

import json
import os

import pytest

from jshard.storage.checkpoint import manifest
from jshard.storage.checkpoint.manifest import ManifestError
from jshard.system.errors import UserError

SIZES = {"state/a": 3, "state/d/b": 9, "state/d/c": 5, "state/e": 9}


@pytest.fixture
def step(tmp_path):
    for name, size in SIZES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "other").touch()
    manifest.write(tmp_path, manifest.checksum(tmp_path, "state"))
    return tmp_path


def test_files_are_dealt_out_in_turn_the_largest_first(step):
    shares = [manifest.checksum(step, "state", i, 2) for i in range(2)]
    assert [[*share] for share in shares] == [
        ["state/d/b", "state/d/c"],
        ["state/e", "state/a"],
    ]
    assert shares[0] | shares[1] == manifest.checksum(step, "state")
    assert {n: file["bytes"] for n, file in (shares[0] | shares[1]).items()} == SIZES
    (one,) = manifest.checksum(step, "state/a").items()
    assert one == ("state/a", {"bytes": 3, "xxh3": shares[1]["state/a"]["xxh3"]})


def test_a_manifest_lists_files_in_order_and_verifies_them(step):
    content = json.loads((step / manifest.FILE).read_text())
    assert content["format"] == 1
    assert [*content["files"]] == sorted(SIZES)
    assert [*content] == ["format", "files"]
    assert (step / manifest.FILE).read_text().startswith('{\n "format"')
    assert manifest.verify(step) == []


def test_each_process_verifies_its_share_of_the_contents_and_all_sizes(step):
    (step / "state/e").write_bytes(b"x" * 9)
    assert manifest.verify(step) == ["state/e has another checksum"]
    assert manifest.verify(step, 0, 2) == []
    assert manifest.verify(step, 1, 2) == ["state/e has another checksum"]
    (step / "state/d/b").write_bytes(bytes(8))
    for index in range(2):
        assert manifest.verify(step, index, 2) == ["state/d/b has 8 bytes, not 9"]


def test_all_problems_are_told(step):
    (step / "state/a").unlink()
    (step / "state/d/b").unlink()
    os.symlink(step / "other", step / "state/d/b")
    (step / "state/e").write_bytes(b"")
    assert manifest.verify(step) == [
        "state/a is missing",
        "state/d/b is not a regular file",
        "state/e has 0 bytes, not 9",
    ]


def test_a_manifest_that_is_a_link_is_none(step, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "manifest.json"
    (step / manifest.FILE).rename(elsewhere)
    for target in (elsewhere, step / "missing"):
        (step / manifest.FILE).symlink_to(target)
        assert manifest.verify(step) == ["manifest.json is not a regular file"]
        with pytest.raises(ManifestError, match="is not a regular file"):
            manifest.read_arrays(step)
        (step / manifest.FILE).unlink()


@pytest.mark.parametrize(
    ("size", "digest", "fine"),
    [
        (0, "", True),
        (1, "ab", True),
        (2**63 - 1, "ab", True),
        (2**63, "ab", False),
        (-1, "ab", False),
        (1.0, "ab", False),
        (True, "ab", False),
        (1, 3, False),
    ],
)
def test_the_entry_of_a_file_has_a_size_and_a_checksum(size, digest, fine, tmp_path):
    files = {"a": {"bytes": size, "xxh3": digest}}
    manifest.write(tmp_path, files)
    if fine:
        assert manifest.read(tmp_path) == files
    else:
        with pytest.raises(ManifestError, match=r"manifest\.json is damaged"):
            manifest.read(tmp_path)


def test_an_older_format_is_read_and_a_newer_one_refused(tmp_path):
    for number in (0, 1):
        (tmp_path / manifest.FILE).write_text(f'{{"format": {number}, "files": {{}}}}')
        assert manifest.read(tmp_path) == {}
    (tmp_path / manifest.FILE).write_text('{"format": 2, "files": {}}')
    with pytest.raises(UserError, match=r"format 2; this one reads up to 1\): upgrade"):
        manifest.read(tmp_path)


def test_arrays_elsewhere_are_read_as_they_were_written(tmp_path):
    arrays = {"url": "s3://b/1-ab", "bytes": 7, "objects": {"state/d/x": "00ff"}}
    manifest.write(tmp_path, {}, arrays)
    assert manifest.read_arrays(tmp_path) == arrays
    for change in ({"bytes": "x"}, {"objects": []}, {"objects": {"a": "0"}}):
        manifest.write(tmp_path, {}, arrays | change)
        with pytest.raises(ManifestError, match=r"manifest\.json is damaged"):
            manifest.read_arrays(tmp_path)
    manifest.write(tmp_path, {})
    with pytest.raises(ManifestError, match=r"manifest\.json is damaged"):
        manifest.read_arrays(tmp_path)
