"""Damaged checkpoints: found, told, and never loaded."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jshard
from checkpoints import (
    OPTIMIZER,
    Model,
    Wider,
    at_step,
    check_equal,
    data_file,
    flip_bit,
    make_fsdp,
)
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.hub.safetensors_read import check_safetensors


def truncate(step: Path) -> None:
    file = data_file(step)
    file.write_bytes(file.read_bytes()[:-1])


def cut_manifest(step: Path) -> None:
    file = step / manifest.FILE
    file.write_text(file.read_text()[:-20])


DAMAGE = {
    "a flipped bit": (lambda s: flip_bit(data_file(s)), "has another checksum"),
    "a truncated file": (truncate, r"has \d+ bytes, not \d+"),
    "a deleted file": (lambda s: data_file(s).unlink(), "is missing"),
    "no array files": (lambda s: shutil.rmtree(s / "state"), "is missing"),
    "no manifest": (lambda s: (s / manifest.FILE).unlink(), "manifest.json cannot"),
    "a cut manifest": (cut_manifest, "manifest.json is damaged"),
    "an empty manifest": (
        lambda s: (s / manifest.FILE).write_text("{}"),
        "manifest.json is damaged",
    ),
    "no description": (
        lambda s: (s / metadata.FILE).unlink(),
        "description.json is missing",
    ),
    "another description": (
        lambda s: flip_bit(s / metadata.FILE),
        "description.json has another checksum",
    ),
    "no Orbax metadata": (
        lambda s: next(s.rglob("_METADATA")).unlink(),
        "_METADATA is missing",
    ),
    "a half-deleted step": (
        lambda s: [p.unlink() for p in sorted(s.rglob("*")) if p.is_file()][:4],
        "cannot be read|is missing",
    ),
    "an empty folder": (
        lambda s: (shutil.rmtree(s), s.mkdir()),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_told_and_the_checkpoint_before_is_used(
    name, state, abstract, folder
):
    damage, message = DAMAGE[name]
    damage(folder / "3")
    told = rf"step 3 is damaged: .*({message}).*: step 2 is used instead"
    with pytest.warns(UserWarning, match=told):
        restored = Checkpointer(folder).restore(abstract)
    check_equal(restored, at_step(state, 2))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_never_loaded_when_it_is_asked_for(
    name, abstract, folder
):
    damage, message = DAMAGE[name]
    damage(folder / "3")
    with pytest.raises(jshard.UserError, match=message):
        Checkpointer(folder).restore(abstract, step=3)


def test_a_flipped_bit_in_any_file_is_found_or_changes_nothing(folder):
    step = folder / "3"
    assert not find_damage(step)
    for file in sorted(path for path in step.rglob("*") if path.is_file()):
        before = file.read_bytes()
        if not before:
            continue
        for position in {0, len(before) // 3, len(before) - 1}:
            content = bytearray(before)
            content[position] ^= 16
            file.write_bytes(content)
            try:
                damage = find_damage(step)
            except jshard.UserError:  # the manifest's format
                damage = "another format"
            assert damage or json.loads(before) == json.loads(bytes(content))
        file.write_bytes(before)
    assert not find_damage(step)


def test_when_all_checkpoints_are_damaged_all_are_listed(abstract, folder):
    for step in (1, 2, 3):
        flip_bit(data_file(folder / str(step)))
    message = "can be used: step 3 is damaged.*step 2 is.*step 1 is.*--workdir"
    with pytest.raises(jshard.UserError, match=message):
        Checkpointer(folder).restore(abstract)


def test_leftovers_of_killed_saves_and_deletions_are_ignored_and_removed(
    state, abstract, folder
):
    shutil.copytree(folder / "3", folder / "4.saving")
    (folder / "4.saving" / manifest.FILE).unlink()
    shutil.copytree(folder / "1", folder / "0.deleting")
    data_file(folder / "0.deleting").unlink()
    (folder / "notes").mkdir()  # not ours
    checkpointer = Checkpointer(folder)
    assert checkpointer.steps() == [1, 2, 3]
    check_equal(checkpointer.restore(abstract), at_step(state, 3))
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "3", "notes"]


def test_a_newer_format_is_refused_and_nothing_older_is_used(abstract, folder):
    file = folder / "3" / manifest.FILE
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": manifest.FORMAT + 1}))
    with pytest.raises(jshard.UserError, match=r"newer jshard .*: upgrade jshard"):
        Checkpointer(folder).restore(abstract)


def test_another_models_checkpoint_is_refused_with_every_difference(folder):
    abstract = make_fsdp().abstract_state(Wider, OPTIMIZER)
    with pytest.raises(jshard.UserError) as refused:
        Checkpointer(folder).restore(abstract)
    message = str(refused.value)
    assert re.search("lacks .*params.tail.bias, params.tail.kernel", message)
    assert "params.head.kernel has shape (16, 8), not (16, 24)" in message
    assert "\n" not in message


def test_another_optimizers_checkpoint_is_refused_with_every_difference(folder):
    abstract = make_fsdp().abstract_state(Model, optax.adamw(1e-3))
    with pytest.raises(jshard.UserError) as refused:
        Checkpointer(folder).restore(abstract)
    assert "lacks opt_state.0.count, opt_state.0.mu.bias" in str(refused.value)
    assert "it has unexpected opt_state.1.rest" in str(refused.value)


def test_thousands_of_differences_are_a_few_and_a_count(tmp_path, abstract):
    wanted = {
        f"params.{i:04}": jax.ShapeDtypeStruct((3,), np.float32) for i in range(5000)
    }
    stored = {f"opt_state.{i:04}": {"shape": [3], "dtype": "int8"} for i in range(2000)}
    stored |= {
        name: {"shape": [i], "dtype": "float32"} for i, name in enumerate(wanted)
    }
    lacking = {name: x for name, x in stored.items() if name != "params.0003"}
    with pytest.raises(jshard.UserError) as refused:
        metadata.check_wanted(tmp_path, wanted, lacking)
    message = str(refused.value)
    assert len(message) < 1500
    assert "it lacks params.0003; it has unexpected opt_state.0000" in message
    assert "opt_state.0007 and 1,992 more" in message
    assert message.endswith(" and 4,993 more")
    names = {f"params.{i}": {"shape": [], "dtype": "int8"} for i in range(5000)}
    with pytest.raises(jshard.UserError, match=r" and 4,992 more$") as refused:
        metadata.check_wanted(tmp_path, {}, names)
    save_file({f"x{i}": np.zeros(1) for i in range(3000)}, tmp_path / "a.safetensors")
    with pytest.raises(jshard.UserError, match=r"; .* and 3,\d\d\d more$") as refused:
        check_safetensors(tmp_path / "a.safetensors", abstract)
    assert len(str(refused.value)) < 1500


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_checkpoints_says_so(there, abstract, tmp_path):
    folder = tmp_path / "empty"
    if there:
        folder.mkdir()
    with pytest.raises(jshard.UserError, match="no checkpoint"):
        Checkpointer(folder).restore(abstract)
    with pytest.raises(jshard.UserError, match="no checkpoint of step 7"):
        Checkpointer(folder).restore(abstract, step=7)
