"""Checkpoints as safetensors files, and back."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jshard
from exports import (
    NAMES,
    WIDTH,
    Layer,
    abstract,
    commands,
    init,
    load_all,
    save,
)
from jshard import export
from jshard.storage.checkpoint import metadata, stored_arrays
from jshard.storage.hub.safetensors_read import is_safetensors, load_safetensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with one checkpoint, and the state that is in it."""
    state = init()
    return save(tmp_path_factory.mktemp("run"), state), state


@pytest.fixture
def command(monkeypatch, capsys):
    return commands(monkeypatch, capsys)


@pytest.mark.quick("5000-mesh0", "1000000000-mesh1", "5000-mesh2")
@pytest.mark.parametrize("mesh", [{}, {"replica": 2}, {"fsdp": 1}])
@pytest.mark.parametrize("shard_bytes", [5000, 10**9])
def test_round_trip_is_bit_equal_on_any_mesh(run, shard_bytes, mesh, tmp_path):
    folder, state = run
    export.export(folder, tmp_path / "out", shard_bytes=shard_bytes)
    assert is_safetensors(tmp_path / "out")
    assert not is_safetensors(folder)
    target = abstract(**mesh)
    loaded = load_safetensors(tmp_path / "out", target)
    for kind in ("params", "frozen"):
        got = jax.tree.leaves(getattr(metadata.replace_arrays(target, loaded), kind))
        for array, want, like in zip(
            got,
            jax.tree.leaves(getattr(state, kind)),
            jax.tree.leaves(getattr(target, kind)),
            strict=True,
        ):
            np.testing.assert_array_equal(array, want)
            assert array.dtype == want.dtype
            assert array.sharding == like.sharding
    statistics = [name for name in loaded if name.startswith("model_state.")]
    assert [name.split(".")[-2:] for name in sorted(statistics)] == [
        ["norm", "mean"],
        ["norm", "var"],
    ]


@pytest.mark.parametrize("chunk", [300, 2000])
def test_chunks_smaller_than_a_layer_and_larger(chunk, run, monkeypatch, tmp_path):
    monkeypatch.setattr(stored_arrays, "_CHUNK", chunk)
    state = run[1]
    export.export(save(tmp_path, state), tmp_path / "out", shard_bytes=3000)
    wanted = metadata.arrays_by_name(state)
    for name, array in load_safetensors(tmp_path / "out", abstract()).items():
        np.testing.assert_array_equal(array, wanted[name])


def test_names_shapes_and_values(run, tmp_path):
    folder, state = run
    export.export(folder, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "model.safetensors",
        "description.json",
    }
    tensors = load_all(tmp_path)
    assert tensors.keys() == NAMES
    arrays = metadata.arrays_by_name(state)
    stacked = np.asarray(arrays["params.decoder.blocks.up.kernel"])
    for i in range(11):
        np.testing.assert_array_equal(
            tensors[f"decoder.blocks.{i}.up.kernel"], stacked[i]
        )
    assert tensors["alias.kernel"].shape == (11, WIDTH, 1)
    assert tensors["decoder.table"].dtype == jnp.bfloat16
    assert tensors["scale"].shape == ()
    np.testing.assert_array_equal(
        tensors["embed.embedding"], arrays["frozen.embed.embedding"]
    )


@pytest.mark.filterwarnings("ignore:.* of the parameters are in no Stack")
def test_stacks_in_stacks_and_a_model_that_is_a_stack(tmp_path):
    model = lambda rngs: jshard.Stack(Layer, 2, rngs=rngs)
    state = init(model=model)
    export.export(save(tmp_path, state), tmp_path / "out")
    tensors = load_all(tmp_path / "out")
    arrays = metadata.arrays_by_name(state)
    stacked = np.asarray(arrays["params.inner.linear.kernel"])
    for i, j in np.ndindex(2, 2):
        np.testing.assert_array_equal(
            tensors[f"{i}.inner.{j}.linear.kernel"], stacked[i, j]
        )
    for name, array in load_safetensors(tmp_path / "out", abstract(model)).items():
        np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("limit", ["100MB", "20KB", "1KB"])
def test_shards_and_index(run, limit, command, tmp_path):
    out = tmp_path / "some" / "out put %41"
    code, said, _ = command(run[0], f"--output={out}", f"--max_shard_size={limit}")
    assert code == 0
    assert said == f"exported step 0: {len(NAMES)} tensors in {out}\n"
    files = sorted(out.glob("*.safetensors"))
    size = {name: array.nbytes for name, array in load_all(out).items()}
    if limit == "100MB":
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (out / "model.safetensors.index.json").exists()
        return
    count = len(files)
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(size.values())
    assert index["weight_map"] == {
        name: file.name for file in files for name in load_file(file)
    }
    for file in files:
        names = list(load_file(file))
        total = sum(size[name] for name in names)
        assert total <= int(limit[:-2]) * {"M": 10**6, "K": 10**3}[limit[-2]] or (
            len(names) == 1
        )
    # Layer 2 comes before layer 10.
    place = index["weight_map"]
    assert place["decoder.blocks.2.up.bias"] <= place["decoder.blocks.10.up.bias"]


def test_dtype(run, command, tmp_path):
    assert command(run[0], "--output", tmp_path, "--dtype=bfloat16")[0] == 0
    tensors = load_all(tmp_path)
    assert {array.dtype for array in tensors.values()} == {jnp.dtype(jnp.bfloat16)}
    embedding = metadata.arrays_by_name(run[1])["frozen.embed.embedding"]
    np.testing.assert_array_equal(
        tensors["embed.embedding"], embedding.astype(jnp.bfloat16)
    )
    # Read back in the dtype that the model has.
    loaded = load_safetensors(tmp_path, abstract())["frozen.embed.embedding"]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, tensors["embed.embedding"])


def test_averages(run, command, tmp_path):
    assert command(run[0], "--output", tmp_path, "--ema")[0] == 0
    tensors = load_all(tmp_path)
    assert tensors.keys() == NAMES
    arrays = metadata.arrays_by_name(run[1].with_ema_params())
    np.testing.assert_array_equal(
        tensors["decoder.blocks.3.up.kernel"],
        arrays["params.decoder.blocks.up.kernel"][3],
    )
    assert tensors["decoder.table"].dtype == jnp.bfloat16  # its average is float32
    np.testing.assert_array_equal(
        tensors["decoder.table"], arrays["params.decoder.table"]
    )
    np.testing.assert_array_equal(
        tensors["embed.embedding"], arrays["frozen.embed.embedding"]
    )


def test_no_averages(run, command, tmp_path):
    folder = save(tmp_path, dataclasses.replace(run[1], ema=None))
    code, _, said = command(folder, "--output", tmp_path / "out", "--ema")
    assert code == 2
    assert said.startswith("jshard: error: --ema: the checkpoint has no averages")
    assert not (tmp_path / "out").exists()


def test_help(command):
    code, said, _ = command("--help")
    assert code == 0
    assert "--max_shard_size" in said
