"""How safetensors files are written: in any order, and with little memory."""

import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jshard
from jshard.checkpoint.checkpointer import Checkpointer
from jshard.checkpoint.safetensors_write import SafetensorsWriter


@hypothesis.given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    chunks=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    dtype=st.sampled_from(["bool", "int8", "bfloat16", "float32", "float64"]),
)
def test_boxes_of_any_kind(tmp_path_factory, shape, chunks, dtype):
    folder = tmp_path_factory.mktemp("boxes")
    values = np.random.default_rng(0).integers(0, 2, shape).astype(jnp.dtype(dtype))
    tensors = {
        name: jax.ShapeDtypeStruct(shape, kind)
        for name, kind in {"odd": jnp.int8, "x": jnp.dtype(dtype)}.items()
    }
    writer = SafetensorsWriter(folder, tensors, 10**9)
    for block in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunks, strict=False))):
        start = tuple(i * c for i, c in zip(block, chunks, strict=False))
        box = tuple(slice(s, s + c) for s, c in zip(start, chunks, strict=False))
        writer.write("x", start, values[box])
    found = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["x"], values)
    assert found["x"].dtype == values.dtype
    assert not found["odd"].any()


MEASURE = """
import sys
from pathlib import Path
from typing import Any

import jax

from jshard.export import export
from jshard.checkpoint.restore import find_step

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
def test_memory_stays_below_a_shard(tmp_path):
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
    # A chunk, all layers of one device's shard, has 10.5 MB. It is there twice, and the
    # allocator keeps some of those before.
    added = int(done.stdout.split()[-1])
    assert added < 50e6, f"{added / 1e6:.0f} MB for shards of 50 MB"
