"""What cannot be exported or imported is told, and leaves nothing."""

import errno
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exports import WIDTH, abstract, commands, init, save
from jshard import export
from jshard.storage.checkpoint import stored_arrays
from jshard.storage.hub.safetensors_read import load_safetensors
from jshard.system.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with one checkpoint, and the state that is in it."""
    state = init()
    return save(tmp_path_factory.mktemp("run"), state), state


@pytest.fixture
def command(monkeypatch, capsys):
    return commands(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--output=out", "--unknown"],
            "unknown argument '--unknown'; see --help",
        ),
        ([], "--output=DIR is missing; see --help"),
        (["--output=out", "--dtype=float31"], "--dtype=float31: must be bfloat16"),
        (["--output=out", "--dtype=int8"], "--dtype=int8: must be bfloat16"),
        (["--output=out", "--max_shard_size=5"], "--max_shard_size=5: expected a size"),
        (["--output=out", "--max_shard_size=0GB"], "--max_shard_size=0GB: expected"),
        (["--output=full"], "--output=full holds model.safetensors already"),
        (["--output="], "--output needs a value"),
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
    monkeypatch.setattr(stored_arrays, "ARRAYS", "elsewhere")
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

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    write = export.write_tensors
    monkeypatch.setattr(export, "write_tensors", fail)
    code, _, err = command(run[0], "--output", out, "--max_shard_size=5KB")
    assert code == 1
    assert err == (
        f"jshard: error: the disk is full: what was written to {out} has been removed\n"
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
        "decoder.blocks.2.up.bias has dtype I32, not float32; "
        "scale has shape [1], not []"
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
