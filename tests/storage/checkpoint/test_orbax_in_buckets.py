"""Orbax's folders in buckets: read like those on a disk, from where they are."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jshard
from bucket_servers import GCS, S3, Folder, running
from filled import filled
from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.storage.checkpoint.buckets.orbax_mirror import COMMITTED, fetch_orbax
from jshard.storage.hub.huggingface_folder import model_path
from jshard.storage.hub.parameters import find_parameters
from saved_by_orbax import TX, Model, make_fsdp, manager, save

pytestmark = [pytest.mark.filterwarnings("ignore:100% of the parameters")]


@pytest.fixture
def upload(tmp_path):
    """Copies a folder into a bucket; returns the URL."""
    with running(Folder, tmp_path / "bucket") as server:
        yield lambda folder: uploaded(folder, server.url)


def uploaded(folder: Path, bucket: str) -> str:
    objects = Objects(f"{bucket}/theirs/{folder.name}")
    for file in folder.rglob("*"):
        if file.is_file():
            objects.write(str(file.relative_to(folder)), file.read_bytes())
    return objects.url


def pair() -> tuple[nnx.Module, nnx.Optimizer]:
    model = filled(lambda: Model(nnx.Rngs(0)))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def values(fsdp: jshard.FSDP, state: jshard.TrainState) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(fsdp.fetch(state.params))]


@pytest.mark.parametrize("kind", ["database", "files"])
def test_a_checkpoint_in_a_bucket_is_that_on_the_disk(kind, upload, tmp_path, x64):
    tree, folder = nnx.state(pair()), tmp_path / "both"
    if kind == "database":
        save(folder, tree)
    else:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
            writer.save(folder, tree)
    fsdp = make_fsdp()
    here = jshard.restore_orbax(folder, fsdp, Model, TX)
    there = jshard.restore_orbax(upload(folder), fsdp, Model, TX)
    jax.tree.map(np.testing.assert_array_equal, *map(fsdp.fetch, (here, there)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [S3, GCS])
def test_servers_of_buckets_are_read_like_a_disk(kind, tmp_path, x64):
    manager(tmp_path / "steps", nnx.state(pair()))
    fsdp = make_fsdp()
    here = jshard.restore_orbax(tmp_path / "steps", fsdp, Model, TX)
    with running(kind, tmp_path / "bucket") as server:
        url = uploaded(tmp_path / "steps", server.url)
        there = jshard.restore_orbax(url, fsdp, Model, TX)
    jax.tree.map(np.testing.assert_array_equal, *map(fsdp.fetch, (here, there)))


def test_a_save_without_its_end_is_no_step(upload, tmp_path, x64):
    """Where folders cannot be renamed, Orbax writes what it saves in its place."""
    steps = tmp_path / "steps"
    manager(steps, nnx.state(pair()))
    about = steps / "8" / "_CHECKPOINT_METADATA"
    content = json.loads(about.read_text()) | {"commit_timestamp_nsecs": None}
    about.write_text(json.dumps(content))
    (steps / "8" / COMMITTED).unlink(missing_ok=True)
    url, fsdp = upload(steps), make_fsdp()
    assert not any(
        x.any() for x in values(fsdp, jshard.restore_orbax(url, fsdp, Model, TX))
    )  # of step 1
    with pytest.raises(jshard.UserError, match=rf"^{url}/8 is a save that Orbax did"):
        jshard.restore_orbax(f"{url}/8", fsdp, Model, TX)
    Objects(f"{url}/8").write(COMMITTED, b"")
    assert any(
        x.any() for x in values(fsdp, jshard.restore_orbax(url, fsdp, Model, TX))
    )


def test_what_is_wrong_names_the_url(upload, tmp_path, x64):
    manager(tmp_path / "steps", nnx.state(pair()))
    url, fsdp = upload(tmp_path / "steps"), make_fsdp()
    with pytest.raises(jshard.UserError, match=rf"^{url} has no step 2; there are"):
        jshard.restore_orbax(url, fsdp, Model, TX, step=2)
    for file in Objects(url).paths("8/default/d/"):
        Objects(url).delete(file)
    with pytest.raises(jshard.UserError, match=rf"{url}/8.*are gone"):
        jshard.restore_orbax(url, fsdp, Model, TX)
    nothing = f"{url[:-6]}/nothing"
    with pytest.raises(jshard.UserError, match=f"{nothing} holds no checkpoint"):
        jshard.restore_orbax(nothing, fsdp, Model, TX)


def test_keys_that_no_folder_can_have_are_one_line(upload, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "_METADATA").write_text("{}")
    url = upload(tmp_path / "a")
    for keys, said in (
        (["_METADATA", "_METADATA/_METADATA"], "cannot be copied to"),
        (["../_METADATA"], "is not the name of a file in the folder"),
    ):
        monkeypatch.setattr(Objects, "paths", lambda objects, below="", x=keys: x)
        monkeypatch.setattr(Objects, "read", lambda objects, path: (b"{}", b""))
        with pytest.raises(jshard.UserError, match=said):
            fetch_orbax(Objects(url), tmp_path / "local")


def test_a_run_takes_the_url_as_checkpoint_restore(upload, tmp_path, x64):
    manager(tmp_path / "steps", nnx.state(pair()))
    url = upload(tmp_path / "steps")
    state = make_fsdp().abstract_state(Model, TX)
    source = find_parameters(model_path(url), state, optimizer=True)
    assert source.orbax is not None
    assert str(source.orbax.checkpoint) == f"Orbax's checkpoint {url}/8, step 8"
