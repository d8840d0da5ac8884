"""A small state that has everything a checkpoint holds, and ways to damage one."""

import contextlib
import dataclasses
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.layout.padding import exact_types
from jshard.sharding.layout.values import transfer
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.parameters import ParameterSource, find_parameters, start_from

WIDTH, LAYERS = 16, 4
POLICY = jshard.Policy(min_shard_elements=0, ema_decay=0.9)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


class Model(nnx.Module):
    """A stack, statistics, both kinds of random streams, a bias nobody divides."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(lambda r: Layer(r), LAYERS, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))
        self.noise = nnx.Dropout(0.1, rngs=rngs)
        self.bias = nnx.Param(jnp.ones(3))
        self.head = jshard.Unit(nnx.Linear(WIDTH, 8, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jshard.pmean(jnp.mean(x, axis=0))
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * mean)
        return self.head(self.noise(self.layers(x))) + jnp.sum(self.bias[...])


class Wider(Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = jshard.Unit(nnx.Linear(WIDTH, 24, rngs=rngs))
        self.tail = nnx.Linear(24, 8, rngs=rngs)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), jshard.optim.muon(1e-2))


def loss_fn(model: Any, batch: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(batch) ** 2), batch.shape[0])


def make_fsdp(
    replica: int = 1, fsdp: int = 8, policy: jshard.Policy = POLICY
) -> jshard.FSDP:
    return jshard.FSDP(jshard.make_mesh(replica=replica, fsdp=fsdp), policy)


def expected(name: str, array: Any, step: int) -> np.ndarray:
    """The values of an array of a state, or the data of a random key."""
    draw = np.random.default_rng([zlib.crc32(name.encode()), step])
    if name == "step":
        return np.asarray(step, array.dtype)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return draw.integers(2**32, size=(*array.shape, 2), dtype=np.uint32)
    return np.asarray(100 * draw.normal(size=array.shape)).astype(array.dtype)


def padded(full: np.ndarray, array: Any) -> np.ndarray:
    """With the zeros that ``array`` has at its ends."""
    widths = [(0, n - m) for n, m in zip(array.shape, full.shape, strict=False)]
    return np.pad(full, widths) if any(map(any, widths)) else full


def make_state(abstract: jshard.TrainState, step: int = 1) -> jshard.TrainState:
    """A state like another, whose values follow from the names of its arrays."""

    def make(name: str, array: Any) -> jax.Array:
        full = padded(expected(name, exact[name], step), array)
        made = jax.make_array_from_callback(
            full.shape, array.sharding, lambda index: full[index]
        )
        random = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        return jax.random.wrap_key_data(made) if random else made

    arrays = metadata.arrays_by_name(abstract)
    exact = metadata.exact_by_name(abstract)
    return metadata.replace_arrays(
        abstract, {name: make(name, array) for name, array in arrays.items()}
    )


def trained(fsdp: jshard.FSDP, steps: int = 1) -> jshard.TrainState:
    """A state as after some steps: no moment is zero. Nothing is compiled for it."""
    return make_state(fsdp.abstract_state(Model, OPTIMIZER), steps)


def save_steps(folder: Path, state: jshard.TrainState, *steps: int, **options) -> None:
    with Checkpointer(folder, **options) as checkpointer:
        for step in steps:
            checkpointer.save(at_step(state, step), metrics={"loss": abs(step - 3.0)})


def on_mesh(state: jshard.TrainState, abstract: jshard.TrainState) -> Any:
    """The same state on another mesh, where it is padded otherwise."""

    def put(x: jax.Array, exact: Any, like: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, like.sharding)
        return transfer.put(np.asarray(x)[tuple(map(slice, exact.shape))], like)

    leaves = map(jax.tree.leaves, (state, exact_types(state), abstract))
    return jax.tree.unflatten(jax.tree.structure(abstract), map(put, *leaves))


def at_step(state: jshard.TrainState, step: int) -> jshard.TrainState:
    """A copy that can be told by its step; the arrays are those of ``state``."""
    return dataclasses.replace(state, step=jnp.full_like(state.step, step))


def values(state: jshard.TrainState) -> dict[str, np.ndarray]:
    """Full values by name, without padding; of random keys their data."""

    def full(array: Any) -> np.ndarray:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        return np.asarray(array)

    exact = exact_types(state)
    shapes = {k: v.shape for k, v in metadata.arrays_by_name(exact).items()}
    found = {k: full(v) for k, v in metadata.arrays_by_name(state).items()}
    return {k: v[tuple(map(slice, shapes[k]))] for k, v in found.items()}


def check_equal(got: jshard.TrainState, want: jshard.TrainState) -> None:
    """Bit for bit."""
    got_values, want_values = values(got), values(want)
    assert got_values.keys() == want_values.keys()
    for name, array in want_values.items():
        assert got_values[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got_values[name], array, err_msg=name)


def data_file(step_folder: Path) -> Path:
    """The largest file that Orbax wrote: of arrays."""
    files = [path for path in step_folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own at ``folder``; skips where this user cannot mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.name != "posix" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, *options: str) -> None:
    """Changes a disk of ``small_disk``, e.g. to "ro" or "size=1g"."""
    joined = ",".join(("remount", *options))
    subprocess.run(["mount", "-o", joined, str(folder)], check=True)


def restore_parameters(
    path: Path, state: jshard.TrainState, *, optimizer: bool = False
) -> jshard.TrainState:
    """A new state with the parameters of a checkpoint or of safetensors files."""
    source = find_parameters(path, state, optimizer=optimizer)
    return read_parameters(source, state)


def read_parameters(
    source: ParameterSource, state: jshard.TrainState
) -> jshard.TrainState:
    """A new state whose parameters are those of a source."""
    replaced = lambda frozen: dataclasses.replace(state, frozen=frozen)
    return start_from(source, state, replaced)
