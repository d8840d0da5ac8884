"""Names and links in files of strangers lead nowhere out of their folder."""

import pytest

import jshard
from damage import json_text
from damaged_files import manifest_reader, tensors_reader
from jshard.storage.checkpoint import manifest
from jshard.storage.hub.safetensors_file import find_tensors
from jshard.storage.hub.safetensors_write import INDEX, SINGLE
from jshard.system.files.untrusted import path_inside

OUTSIDE = ("../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//x", "x\0", 3, None)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_stay_in_their_folder(name, tmp_path):
    with pytest.raises(ValueError, match="is not the name of a file"):
        path_inside(tmp_path, name)
    (tmp_path / INDEX).write_bytes(json_text({"weight_map": {"a": name}}))
    with pytest.raises(jshard.UserError, match=r"cannot read .*index\.json"):
        find_tensors(tmp_path)
    files = {str(name): {"bytes": 1, "xxh3": ""}}
    (tmp_path / manifest.FILE).write_bytes(json_text({"format": 1, "files": files}))
    if isinstance(name, str):
        assert manifest.verify(tmp_path) == ["manifest.json is damaged"]


def test_links_out_of_a_checkpoint_are_refused(tmp_path):
    for link in ("state", "state/d"):
        step = tmp_path / link.replace("/", "-")
        step.mkdir()
        file, _, _ = manifest_reader(step)
        (step / link).rename(tmp_path / f"outside-{step.name}")
        (step / link).symlink_to(tmp_path / f"outside-{step.name}")
        assert file.exists()
        assert len(manifest.verify(step)) == 1
        assert "state" in manifest.verify(step)[0]


def test_links_of_the_hub_s_cache_are_followed(tmp_path):
    blob, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blob.mkdir()
    snapshot.mkdir()
    file, _, _ = tensors_reader(blob)
    (snapshot / SINGLE).symlink_to(file)
    assert set(find_tensors(snapshot)) == {"a", "b"}
