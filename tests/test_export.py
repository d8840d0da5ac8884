"""Checkpoints as safetensors files, and back."""

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jshard
from jshard import checkpoint, description, export
from jshard.errors import UserError
from jshard.safetensors_read import is_safetensors, load_safetensors
from jshard.safetensors_write import SafetensorsWriter

WIDTH = 16


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 1, use_bias=False, rngs=rngs)
        self.inner = jshard.Stack(Inner, 2, rngs=rngs)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.blocks = jshard.Stack(Layer, 11, rngs=rngs)
        self.table = nnx.Param(jnp.ones((WIDTH, 3), jnp.bfloat16))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.decoder = Decoder(rngs)
        self.embed = jshard.Unit(nnx.Embed(40, WIDTH, rngs=rngs))
        self.tied = self.embed
        self.alias = self.decoder.blocks.gate
        self.scale = nnx.Param(jnp.float32(3))
        self.layers = nnx.List([nnx.Linear(WIDTH, 2, use_bias=False, rngs=rngs)])


NAMES = {
    "alias.kernel",  # named outside its Stack, it stays stacked
    *(f"decoder.blocks.{i}.inner.{j}.linear.kernel" for i, j in np.ndindex(11, 2)),
    *(f"decoder.blocks.{i}.norm.mean" for i in range(11)),
    *(f"decoder.blocks.{i}.norm.var" for i in range(11)),
    *(f"decoder.blocks.{i}.up.bias" for i in range(11)),
    *(f"decoder.blocks.{i}.up.kernel" for i in range(11)),
    "decoder.table",
    "embed.embedding",
    "layers.0.kernel",
    "scale",
}


def not_embed(path, value):
    return isinstance(value, nnx.Param) and "embed" not in path


def make_fsdp(ema_decay=None, **mesh):
    policy = jshard.Policy(min_shard_elements=0, ema_decay=ema_decay)
    return jshard.FSDP(jshard.make_mesh(**mesh), policy)


def init(model: Any = Model):
    state = make_fsdp(ema_decay=0.9).init(model, optax.sgd(0.1), wrt=not_embed)
    return dataclasses.replace(state, ema=jax.tree.map(lambda x: x + 1, state.ema))


def save(folder, state):
    with checkpoint.Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(state)
    return folder


def abstract(model: Any = Model, **mesh):
    return make_fsdp(**mesh).abstract_state(model, optax.sgd(0.1), wrt=not_embed)


def load_all(folder):
    """What the files hold, by the safetensors package alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with one checkpoint, and the state that is in it."""
    state = init()
    return save(tmp_path_factory.mktemp("run"), state), state


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line; gives its exit code and what it says."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
        code = 0
        try:
            export.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


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
        got = jax.tree.leaves(getattr(description.replace_arrays(target, loaded), kind))
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
    monkeypatch.setattr(checkpoint, "_CHUNK", chunk)
    state = run[1]
    export.export(save(tmp_path, state), tmp_path / "out", shard_bytes=3000)
    wanted = description.arrays_by_name(state)
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
    arrays = description.arrays_by_name(state)
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
    arrays = description.arrays_by_name(state)
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
    embedding = description.arrays_by_name(run[1])["frozen.embed.embedding"]
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
    arrays = description.arrays_by_name(run[1].with_ema_params())
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--output=out", "--unknown"],
            "unrecognized arguments: --unknown; see --help",
        ),
        ([], "the following arguments are required: --output; see --help"),
        (["--output=out", "--dtype=float31"], "--dtype=float31: expected one of"),
        (["--output=out", "--dtype=int8"], "--dtype=int8: expected one of"),
        (["--output=out", "--max_shard_size=5"], "--max_shard_size=5: expected a size"),
        (["--output=out", "--max_shard_size=0GB"], "--max_shard_size=0GB: expected"),
        (["--output=full"], "--output=full holds model.safetensors already"),
        (["--output=file"], "cannot export: file: Not a directory"),
        (["--output=file/out"], "cannot export: file/out"),
    ],
)
def test_bad_input_is_one_line(words, said, run, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").touch()
    code, _, err = command(run[0], *words)
    assert code == 2
    assert err.startswith(f"jshard: error: {said}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "said"), [("nowhere", "does not exist"), ("", "holds no checkpoint")]
)
def test_no_checkpoint(path, said, command, tmp_path):
    code, _, err = command(tmp_path / path, "--output", tmp_path / "out")
    assert (code, err) == (2, f"jshard: error: {tmp_path / path} {said}\n")


def test_help(command):
    code, said, _ = command("--help")
    assert code == 0
    assert "--max_shard_size" in said


def test_a_damaged_checkpoint_is_not_exported(run, command, tmp_path):
    step = tmp_path / "checkpoints" / "0"
    shutil.copytree(run[0] / "checkpoints" / "0", step)
    data = max(step.rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    for path in (tmp_path, step):
        code, _, err = command(path, "--output", tmp_path / "out")
        assert code == 2
        assert "has another checksum" in err
        assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_disappears(run, command, monkeypatch, tmp_path):
    monkeypatch.setattr(export, "ARRAYS", "elsewhere")
    code, _, err = command(run[0], "--output", tmp_path / "out")
    assert code == 2
    assert "has the run deleted it?" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing(run, there, command, monkeypatch, tmp_path):
    out = tmp_path / "out"
    if there:
        out.mkdir()
        (out / "tokenizer.json").touch()
    calls = []

    def fail(self, *arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)

    write = SafetensorsWriter.write
    monkeypatch.setattr(SafetensorsWriter, "write", fail)
    code, _, err = command(run[0], "--output", out)
    assert code == 1
    assert err == (
        f"jshard: error: the disk is full: nothing of the export is left in {out}\n"
    )
    assert [file.name for file in tmp_path.rglob("*")] == (
        ["out", "tokenizer.json"] if there else []
    )


@pytest.mark.parametrize("told", ["before", "while writing"])
def test_a_small_disk(run, told, command, monkeypatch, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "jshard-test", str(tmp_path)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("no permission to mount a small disk")
    try:
        if told == "while writing":
            monkeypatch.setattr(export, "_check_space", lambda *_: None)
        code, _, err = command(run[0], "--output", tmp_path)
        assert code == 1
        assert err.count("\n") == 1
        assert ("has 0 MB free" if told == "before" else "the disk is full") in err
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_a_killed_export_left_is_cleaned_up(run, tmp_path):
    left = tmp_path / export._UNFINISHED
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").touch()
    export.export(run[0], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "model.safetensors",
        "description.json",
    }


def test_every_difference_is_listed(run, tmp_path):
    export.export(run[0], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["decoder.blocks.7.up.kernel"], tensors["layers.0.kernel"]
    tensors["head.kernel"] = np.zeros(3, np.float32)
    tensors["scale"] = np.zeros(1, np.float32)
    tensors["decoder.blocks.2.up.bias"] = np.zeros(3 * WIDTH, np.int32)
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        load_safetensors(file, abstract())
    assert str(caught.value) == (
        f"{file} is of another model: decoder.blocks.7.up.kernel is missing; "
        "layers.0.kernel is missing; head.kernel is not in the model; "
        "decoder.blocks.2.up.bias is I32, unlike the model's; "
        "scale is [1], the model's []"
    )


def test_files_that_cannot_be_read(run, tmp_path):
    with pytest.raises(UserError, match=r"there is no .*/out"):
        load_safetensors(tmp_path / "out", abstract())
    with pytest.raises(UserError, match=r"no .*model\.safetensors and no .*index"):
        load_safetensors(tmp_path, abstract())
    export.export(run[0], tmp_path, shard_bytes=20000)
    file = next(tmp_path.glob("model-00001-of-*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"cannot read .*00001"):
        load_safetensors(tmp_path, abstract())
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read .*00001"):
        load_safetensors(tmp_path, abstract())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read .*index"):
        load_safetensors(tmp_path, abstract())
