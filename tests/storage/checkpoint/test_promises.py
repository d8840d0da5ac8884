"""What checkpoints promise, on states whose values are known: nothing is trained."""

import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints import data_file, flip_bit
from jshard.export import export
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.checkpoint.restore import find_damage
from known_states import (
    abstract,
    check_state,
    check_whole,
    expected,
    restore_step,
    save_and_die,
    save_steps,
)
from processes import Processes


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 1 and 2 of eight devices; do not change them."""
    folder = tmp_path_factory.mktemp("saved")
    assert [done.error for done in save_steps(folder, (1, 8), 1, 2)] == ["", ""]
    return folder


@pytest.mark.core
def test_a_state_of_one_mesh_is_restored_on_others_bit_for_bit(saved):
    for mesh in ((1, 1), (4, 2)):
        wanted = abstract(*mesh)
        restored = Checkpointer(saved).restore(wanted)
        check_state(restored, 2)
        name = "params.layers.linear.kernel"
        there = metadata.arrays_by_name(restored)[name].sharding
        assert there == metadata.arrays_by_name(wanted)[name].sharding


@pytest.mark.core
def test_a_flipped_bit_is_found_and_the_step_before_is_used(tmp_path):
    save_steps(tmp_path, (1, 8), 1, 2)
    flip_bit(data_file(tmp_path / "2"))
    assert find_damage(tmp_path / "2").endswith("has another checksum")
    with pytest.warns(UserWarning, match=r"step 2 is damaged: .* step 1 is used"):
        assert restore_step(tmp_path, (1, 8)) == 1


@pytest.mark.core
def test_a_process_that_is_killed_while_it_saves_loses_no_step(tmp_path):
    folder = tmp_path / "checkpoints"
    with Processes(1, 2, tmp_path) as processes:
        processes.start(
            save_and_die, folder, 0, "jshard.storage.checkpoint.manifest.write"
        )
        assert processes.wait_for(0, timeout=60) == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2.saving"]
    assert restore_step(folder, (1, 8)) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["1"]
    check_whole(folder / "1")


@pytest.mark.core
def test_an_export_has_the_exact_values(saved, tmp_path):
    export(saved, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    exact = metadata.exact_by_name(abstract())
    wanted = {}
    for name, array in exact.items():
        kind, _, rest = name.partition(".")
        if kind == "params":
            values = expected(name, array, 2)
            stacked = rest.partition("layers.")[2]
            wanted |= (
                {f"layers.{i}.{stacked}": x for i, x in enumerate(values)}
                if stacked
                else {rest: values}
            )
    assert {*wanted} <= {*tensors}
    assert len(wanted) == 11
    for name, values in wanted.items():
        assert tensors[name].dtype == values.dtype
        np.testing.assert_array_equal(tensors[name], values)
