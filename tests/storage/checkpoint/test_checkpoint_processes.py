"""Checkpoints of several processes, which are real ones here."""

import json
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx

import jshard
from checkpoints import flip_bit, make_fsdp, small_disk
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.step_folders import find_steps
from known_states import (
    abstract,
    check_whole,
    make_state,
    restore_step,
    save_steps,
)
from processes import Processes
from transfers import flipped, on_the_way
from troubled_saves import (
    check_trouble,
    full_disk,
    no_large_files,
    no_manifest,
    save_in_trouble,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Processes]:
    """Two processes with four devices each."""
    with Processes(2, 4, tmp_path_factory.mktemp("pair")) as processes:
        yield processes


# On any mesh, by any processes.


def save_and_count(folder: Path) -> tuple[list[Save], int]:
    """Saves the steps 1 and 2; how many manifests are written here, too."""
    with mock.patch.object(manifest, "write", wraps=manifest.write) as write:
        reports = save_steps(folder, (1, 8), 1, 2)
    return reports, write.call_count


@pytest.fixture(scope="module")
def saves(pair, tmp_path_factory) -> tuple[Path, list[Any]]:
    """A folder with the steps 1 and 2 of two processes, and what each of them tells."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, pair.call(save_and_count, folder)


@pytest.fixture(scope="module")
def saved(saves) -> Path:
    """That folder; do not change it."""
    return saves[0]


@pytest.mark.core
def test_two_processes_leave_whole_checkpoints_and_nothing_else(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2"]
    for step in ("1", "2"):
        check_whole(saved / step)
        about = metadata.read(saved / step)
        assert (about["step"], about["processes"]) == (int(step), 2)


def test_one_process_writes_the_manifests_and_both_report_their_saves(saves):
    _, told = saves
    assert [written for _, written in told] == [2, 0]
    for reports, _ in told:
        assert [save.error for save in reports] == ["", ""]


@pytest.mark.parametrize(
    "mesh", [(1, 8), (1, 2), pytest.param((2, 4), marks=pytest.mark.core)], ids=str
)
def test_what_two_processes_saved_comes_back_in_one(mesh, saved):
    assert restore_step(saved, mesh) == 2


@pytest.mark.quick("(2, 4)", "(8, 1)")
@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (8, 1)], ids=str)
def test_what_two_processes_saved_comes_back_in_two(mesh, saved, pair):
    assert pair.call(restore_step, saved, mesh) == [2, 2]


def restore_with_a_flip(folder: Path) -> str:
    """What is said of a bit that flips on the way to a device of process 1."""
    damage, _ = flipped(np.random.default_rng(0), (4, 16, 16))
    with pytest.MonkeyPatch.context() as patched:
        if jax.process_index() == 1:
            on_the_way(patched, "params.layers.linear.kernel", damage)
        with pytest.raises(jshard.UserError) as error:
            Checkpointer(folder).restore(abstract(1, 8))
    return str(error.value)


def test_a_bit_that_flips_on_the_way_to_one_process_ends_the_restore_on_both(
    saved, pair
):
    said = pair.call(restore_with_a_flip, saved)
    for text in said:
        assert "params.layers.linear.kernel has other bits on the devices than" in text
    assert "to device" not in said[0]
    assert "(process 1)" in said[1]


def test_what_one_process_saved_comes_back_in_two(pair, tmp_path):
    save_steps(tmp_path, (1, 2), 7)
    assert pair.call(restore_step, tmp_path, (2, 4)) == [7, 7]


@pytest.mark.slow
def test_four_processes_restore_what_others_saved_and_one_what_they_did(
    saved, tmp_path
):
    save_steps(tmp_path / "one", (4, 2), 7)
    with Processes(4, 2, tmp_path) as four:
        for mesh in ((1, 8), (2, 4), (4, 2)):
            assert four.call(restore_step, saved, mesh) == [2] * 4
            assert four.call(restore_step, tmp_path / "one", mesh) == [7] * 4
        for mesh in ((1, 8), (4, 2)):
            reports = four.call(save_steps, tmp_path / f"four-{mesh}", mesh, 3)
            assert [save.error for (save,) in reports] == [""] * 4
            check_whole(tmp_path / f"four-{mesh}" / "3")
            assert restore_step(tmp_path / f"four-{mesh}", (1, 8)) == 3


def test_a_step_that_two_processes_save_again_is_replaced(pair, tmp_path):
    for mesh in ((1, 8), (2, 4)):
        for reports in pair.call(save_steps, tmp_path, mesh, 5):
            assert [save.error for save in reports] == [""]
    check_whole(tmp_path / "5")
    assert metadata.read(tmp_path / "5")["mesh"] == {"replica": 2, "fsdp": 4}
    assert restore_step(tmp_path, (1, 8)) == 5


# What each process reads.


def hash_and_read(folder: Path) -> tuple[dict[str, int], int, int]:
    """Restores large arrays; (hashed files, bytes of arrays that are read, here)."""

    def model(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(1024, 2048, use_bias=False, rngs=rngs)

    fsdp = make_fsdp()
    wanted = fsdp.abstract_state(model, optax.adam(1e-3))
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(make_state(wanted))
    hashed: dict[str, int] = {}
    hash_file = manifest._hash_file

    def count(path: Path) -> dict[str, Any]:
        result = hash_file(path)
        hashed[str(path)] = result["bytes"]
        return result

    before = bytes_read()
    with mock.patch.object(manifest, "_hash_file", count):
        restored = Checkpointer(folder).restore(wanted)
    read = bytes_read() - before
    here = sum(
        shard.data.nbytes
        for array in jax.tree.leaves(restored)
        for shard in array.addressable_shards
    )
    return hashed, read, here


def bytes_read() -> int:
    name = "/tensorstore/kvstore/file/bytes_read"
    metrics = tensorstore.experimental_collect_matching_metrics(name)
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_each_process_verifies_and_reads_its_half_alone(pair, tmp_path):
    results = pair.call(hash_and_read, tmp_path)
    (step,) = tmp_path.iterdir()
    (first, *_), (second, *_) = results
    files = manifest.read(step)
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == {str(step / name) for name in files}
    total = sum(file["bytes"] for file in files.values())
    assert total > 24e6
    for hashed, read, here in results:
        assert 0.45 * total < sum(hashed.values()) < 0.55 * total
        assert 0.49 * total < here < 0.51 * total
        assert here <= read < 1.1 * here  # a tenth for what describes arrays


# Damage.


def restore_told(folder: Path) -> tuple[int, str]:
    """The step that is restored, and what is said of those that are not."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = restore_step(folder, (1, 8))
    return step, " ".join(str(warning.message) for warning in told)


@pytest.mark.parametrize("finder", [0, 1])
def test_damage_in_either_processs_part_makes_both_fall_back(
    finder, saved, pair, tmp_path
):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    sizes = {k: file["bytes"] for k, file in manifest.read(folder / "2").items()}
    flip_bit(folder / "2" / manifest._share(sizes, finder, 2)[0])
    told = [f"process {finder} found damaged files"] * 2
    told[finder] = "has another checksum"
    for process, (step, said) in enumerate(pair.call(restore_told, folder)):
        assert step == 1
        assert "step 2 is damaged: " in said
        assert told[process] in said


def refused(folder: Path, step: int | None) -> str:
    with pytest.raises(jshard.UserError) as error:
        Checkpointer(folder).restore(abstract(), step)
    return str(error.value)


def test_both_processes_refuse_what_none_may_use(saved, pair, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    for said in pair.call(refused, folder, 7):
        assert "no checkpoint of step 7" in said
    file = folder / "2" / manifest.FILE
    newer = {**json.loads(file.read_text()), "format": manifest.FORMAT + 1}
    file.write_text(json.dumps(newer))
    for said in pair.call(refused, folder, None):
        assert "was written by a newer jshard" in said
    file.unlink()
    flip_bit(folder / "1" / metadata.FILE)
    for said in pair.call(refused, folder, None):
        assert "no checkpoint in" in said
        assert "step 2 is damaged: manifest.json cannot be read" in said
        assert "step 1 is damaged: " in said


# Disks.


@pytest.mark.slow  # below, a disk that is full for one; test_failing_saves.py fills one
def test_a_full_disk_fails_a_save_on_both_and_the_next_one_is_saved(pair, tmp_path):
    with small_disk(tmp_path / "disk", "700k") as disk:
        results = pair.call(save_in_trouble, disk, full_disk, disk)
        check_trouble(results, disk, "No space left on device")


@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_process_that_cannot_write_fails_a_save_on_both(process, pair, tmp_path):
    results = pair.call(save_in_trouble, tmp_path, no_large_files, process)
    check_trouble(results, tmp_path, "File too large")
    assert "File too large" in results[process][1].error
    assert "failed on another process" in results[1 - process][1].error


def test_a_manifest_that_cannot_be_written_fails_a_save_on_both(pair, tmp_path):
    results = pair.call(save_in_trouble, tmp_path, no_manifest)
    check_trouble(results, tmp_path, "I/O error")


def save_to_two(first: Path, second: Path) -> list[str]:
    """Two checkpointers at a time; the save of the first one ends last."""
    reports: list[Save] = []
    late, go_on = Checkpointer(first, report=reports.append), threading.Event()
    write = late._saves.write

    def write_late(*args: Any) -> Any:
        if jax.process_index() == 0:
            assert go_on.wait(60)
        return write(*args)

    with mock.patch.object(late._saves, "write", write_late):
        late.save(make_state(abstract(), 1))
        with Checkpointer(second, report=reports.append) as other:
            for step in (1, 2):
                other.save(make_state(abstract(), step))
        go_on.set()
        late.wait()
    return [save.error for save in reports]


@pytest.mark.slow  # by default, two processes save one after the other
def test_two_checkpointers_of_two_processes_save_at_a_time(pair, tmp_path):
    assert pair.call(save_to_two, tmp_path / "a", tmp_path / "b") == [[""] * 3] * 2
    assert find_steps(tmp_path / "a") == [1]
    assert find_steps(tmp_path / "b") == [1, 2]


def restore_from_orbax(folder: Path, kernel: np.ndarray) -> tuple[int, int]:
    """The step, and how many shards of the kernel and its average are right here."""
    make = lambda rngs: nnx.Linear(3, 5, rngs=rngs)
    with warnings.catch_warnings(action="ignore"):  # of a model without units
        state = jshard.restore_orbax(folder, make_fsdp(), make, optax.sgd(0.1))
    assert state.ema is not None
    right = 0
    for params in (state.params, state.ema):
        (array,) = jax.tree.leaves(params["kernel"])
        padding = [(0, n - m) for n, m in zip(array.shape, kernel.shape, strict=True)]
        whole = np.pad(kernel, padding)
        for shard in array.addressable_shards:
            right += np.array_equal(shard.data, whole[shard.index])
    return int(state.step), right


@pytest.mark.slow  # by default test_orbax_folders.py, in one process
def test_two_processes_go_on_from_the_newest_step_of_orbaxs(pair, tmp_path):
    kernel = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        for step in (4, 8):
            tree = {"kernel": kernel * step, "bias": np.zeros(5, np.float32)}
            manager.save(step, args=ocp.args.StandardSave(tree))
    told = pair.call(restore_from_orbax, tmp_path / "steps", kernel * 8)
    assert told == [(8, 8), (8, 8)]
