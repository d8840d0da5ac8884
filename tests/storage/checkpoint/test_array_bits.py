"""A restore compares the bits on the devices with those that were saved."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard
from checkpoints import (
    OPTIMIZER,
    Model,
    at_step,
    check_equal,
    make_fsdp,
    restore_parameters,
    save_steps,
    trained,
)
from h100 import h100s
from jshard.plan import compile_for
from jshard.sharding.step.replay.bits import words_of
from jshard.storage.checkpoint import array_bits, manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from transfers import flipped, on_the_way

STEP = 3
NAMES = (
    "params.layers.linear.kernel",
    "params.head.kernel",
    "ema.bias",
    "model_state.mean",
)


DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_hash_is_that_of_the_exact_array_however_it_is_split_and_padded(
    dtype, compiled, monkeypatch
):
    """Compiled, as for GPUs, too."""
    if compiled:
        monkeypatch.setattr(array_bits, "platform", lambda mesh: "gpu")
    exact = jnp.asarray(np.random.default_rng(0).integers(0, 7, (5, 7, 4)), dtype)
    words = np.asarray(words_of(exact)).astype(np.uint64).ravel()
    weights = 2 * np.arange(words.size, dtype=np.uint64) + 1
    want = f"{(words * weights).sum(dtype=np.uint64):016x}"
    devices = np.array(jax.devices()[:6])
    for sizes, spec, shape in (
        ((1, 6), PartitionSpec(), (5, 7, 4)),
        ((2, 3), PartitionSpec("a", None, "b"), (6, 7, 6)),
        ((3, 2), PartitionSpec(None, ("a", "b")), (5, 12, 4)),
        ((3, 2), PartitionSpec("b"), (6, 7, 4)),
    ):
        # Padding is zeros at rest, but need not be.
        full = np.ones(shape).astype(exact.dtype)
        full[:5, :7, :4] = np.asarray(exact)
        mesh = Mesh(devices.reshape(sizes), ("a", "b"))
        x = jax.device_put(full, NamedSharding(mesh, spec))
        assert array_bits.hashes_of({"x": x}, {"x": (5, 7, 4)}) == {"x": want}


def test_numpy_and_compiled_programs_have_the_same_hashes(monkeypatch):
    values = np.random.default_rng(0).standard_normal((3, 50, 7), np.float32)
    arrays = {"x": jnp.asarray(values), "key": jax.random.key(7), "step": jnp.int32(3)}
    shapes = {name: x.shape for name, x in arrays.items()}
    with_numpy = array_bits.hashes_of(arrays, shapes)
    monkeypatch.setattr(array_bits, "platform", lambda mesh: "gpu")
    assert with_numpy == array_bits.hashes_of(arrays, shapes)
    kinds = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((8,), ("a",), axis_types=kinds)):
        assert with_numpy == array_bits.hashes_of(arrays, shapes)
    assert len({*with_numpy.values()}) == 3


def test_a_save_records_the_same_hashes_on_any_mesh(saved, tmp_path):
    save_steps(tmp_path, trained(make_fsdp(1, 6)), STEP)
    one, other = (
        metadata.read(folder / str(STEP))["arrays"] for folder in (saved, tmp_path)
    )
    of_one = {name: entry[metadata.BITS] for name, entry in one.items()}
    assert of_one == {name: entry[metadata.BITS] for name, entry in other.items()}
    assert len({*of_one.values()}) == len(of_one) > 20


def found(folder: Path, fsdp: jshard.FSDP) -> str:
    abstract = fsdp.abstract_state(Model, OPTIMIZER)
    with pytest.raises(jshard.UserError) as error:
        Checkpointer(folder).restore(abstract)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.quick("8-4", "6-3")
@pytest.mark.parametrize(
    ("before", "after"), [(8, 4), (6, 3), (4, 8), (1, 8), (8, 1), (3, 5)]
)
def test_a_bit_that_flips_on_the_way_to_a_device_is_found_and_named(
    before, after, tmp_path, monkeypatch
):
    """16 columns on 6, 3 and 5 devices, and 3 biases on 4 and 8, are padded."""
    state = trained(make_fsdp(1, before), STEP)
    save_steps(tmp_path, state, STEP)
    exact = metadata.exact_by_name(state)
    fsdp, rng = make_fsdp(1, after), np.random.default_rng(before)
    for name in NAMES:
        damage, where = flipped(rng, exact[name].shape)
        with monkeypatch.context() as patched:
            on_the_way(patched, name, damage)
            said = found(tmp_path, fsdp)
        (device,) = where
        assert f": {name} has other bits on the devices than in its file" in said
        assert f"on the way there, to device {device} (process 0)" in said
    restored = Checkpointer(tmp_path).restore(fsdp.abstract_state(Model, OPTIMIZER))
    check_equal(restored, state)


@pytest.mark.slow
def test_a_hundred_flips_are_all_found_and_named(saved, monkeypatch):
    fsdp, rng = make_fsdp(2, 3), np.random.default_rng(0)
    exact = metadata.exact_by_name(trained(fsdp))
    names = [k for k, x in exact.items() if x.ndim and "key" not in str(x.dtype)]
    for name in rng.choice(names, 100):
        damage, where = flipped(rng, exact[name].shape)
        with monkeypatch.context() as patched:
            on_the_way(patched, name, damage)
            said = found(saved, fsdp)
        assert f": {name} has other bits on the devices than in its file" in said
        assert said.endswith(f"to device {where[0]} (process 0)")


def test_bits_that_were_other_ones_before_they_were_written_are_found(
    saved, monkeypatch
):
    damage, _ = flipped(np.random.default_rng(0), (4, 16, 16))
    on_the_way(monkeypatch, NAMES[0], damage, times=2)
    assert "and so it has when it is read again" in found(saved, make_fsdp())


def test_parameters_alone_are_compared_too(saved, monkeypatch):
    damage, _ = flipped(np.random.default_rng(0), (4, 16, 16))
    on_the_way(monkeypatch, NAMES[0], damage)
    with pytest.raises(jshard.UserError, match=f"{NAMES[0]} has other bits"):
        restore_parameters(saved / str(STEP), trained(make_fsdp()))


def test_a_checkpoint_without_hashes_is_read(state, saved, abstract, tmp_path):
    save_steps(tmp_path, state, STEP)
    folder = tmp_path / str(STEP)
    about = json.loads((folder / metadata.FILE).read_text())
    for entry in about["arrays"].values():
        del entry[metadata.BITS]
    metadata.write(folder, about)
    files = manifest.read(folder) | manifest.checksum(folder, metadata.FILE)
    manifest.write(folder, files)
    check_equal(Checkpointer(tmp_path).restore(abstract), at_step(state, STEP))


@pytest.mark.h100
def test_the_program_for_gpus_needs_no_memory():
    mesh = h100s(8)
    sharding = NamedSharding(mesh.abstract_mesh, PartitionSpec(None, "fsdp"))
    x = jax.ShapeDtypeStruct((32, 4096, 4096), jnp.bfloat16, sharding=sharding)
    with jax.enable_x64(True):
        program = array_bits._program(
            mesh.abstract_mesh, (sharding.spec,), ((32, 4090, 4096),)
        )
        compiled = compile_for(mesh, program.trace(x))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 20
