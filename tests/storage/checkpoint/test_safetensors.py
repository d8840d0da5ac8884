"""How safetensors files are written: any tensors, one file in memory at a time."""

import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jshard
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.safetensors_write import assign_files, write_tensors


@hypothesis.given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1),
    dtype=st.sampled_from(["bool", "int8", "bfloat16", "float32", "float64"]),
    limit=st.integers(1, 2000),
)
def test_tensors_of_any_kind(tmp_path_factory, shapes, dtype, limit):
    folder = tmp_path_factory.mktemp("tensors")
    tensors = {
        f"x{i}": np.random.default_rng(i).integers(0, 2, shape).astype(jnp.dtype(dtype))
        for i, shape in enumerate(shapes)
    }
    sizes = {name: array.nbytes for name, array in tensors.items()}
    files = assign_files(sizes, limit)
    assert [name for names in files.values() for name in names] == list(tensors)
    for file, names in files.items():
        assert len(names) == 1 or sum(sizes[name] for name in names) <= limit
        write_tensors(folder / file, {name: tensors[name] for name in names})
        found = load_file(folder / file)
        assert found.keys() == set(names)
        for name in names:
            np.testing.assert_array_equal(found[name], tensors[name])
            assert found[name].dtype == tensors[name].dtype


def test_files_have_the_permissions_of_others(tmp_path):
    (tmp_path / "other").touch()
    write_tensors(tmp_path / "x", {"x": np.ones(1)})
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "other").stat().st_mode


MEASURE = """
import sys
from pathlib import Path
from typing import Any

import jax

from jshard.export import export
from jshard.storage.checkpoint.restore import find_step

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line)

jax.config.update("jax_platforms", "cpu")
jax.devices()
before = peak()
export(Path(sys.argv[1]), Path(sys.argv[2]), shard_bytes=50 * 10**6)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")
def test_memory_holds_one_file_at_a_time(tmp_path):
    class Wide(nnx.Module):
        def __init__(self, rngs):
            for i in range(5):
                linear = nnx.Linear(1024, 1024, use_bias=False, rngs=rngs)
                setattr(self, f"linear{i}", linear)

    class Deep(nnx.Module):  # 420 MB
        def __init__(self, rngs):
            self.blocks = jshard.Stack(Wide, 20, rngs=rngs)

    fsdp = jshard.FSDP(jshard.make_mesh())
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(fsdp.init(Deep, optax.sgd(0.1)))
    words = [sys.executable, "-c", MEASURE, tmp_path, tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 10
    # The tensors of a file, a chunk (all layers of one device's shard, 10.5 MB) in two
    # forms, and what the allocator keeps (158 MB in all on a busy machine).
    added = int(done.stdout.split()[-1])
    assert added < 175e6, f"{added / 1e6:.0f} MB for files of 50 MB"
