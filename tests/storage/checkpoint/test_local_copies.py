"""Copies of a run's state on its own host: bit for bit, or not used, and said."""

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from checkpoints import OPTIMIZER, Model, at_step, flip_bit, make_fsdp, small_disk
from damaged_files import Adapted
from jshard.storage.checkpoint.local import LocalCopies
from jshard.storage.checkpoint.local.exchange import _Server
from jshard.storage.checkpoint.local.pieces import neighbors
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers
from jshard.system.network.authenticated import Stranger, Strangers, call
from known_states import abstract, make_state
from resumable import read_metrics
from stopped_runs import RECIPE, train

pytestmark = pytest.mark.usefixtures("compiled_once")


def copies_of(
    folder: Path, fsdp: jshard.FSDP, model: Any = Model, tx=OPTIMIZER, **options
):
    abstract = fsdp.abstract_state(model, tx, **options)
    return LocalCopies(folder, str(folder / "run"), abstract, Peers())


def keep(copies: LocalCopies, state: jshard.TrainState, *steps: int, start=0):
    """The outcomes of copies of a state as that of these steps."""
    ended = []
    for step in steps:
        copies.keep(
            at_step(state, step), "it", start, {"step": f"{step}"}, ended.append
        )
    copies.wait()
    return ended


def check_same_shards(got: jshard.TrainState, want: jshard.TrainState) -> None:
    """Every shard on its device and in its memory, padding too, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        for one, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
            assert one.device == other.device
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()


@pytest.mark.quick("None-1", "optimizer-2", "all-1")
@pytest.mark.parametrize("replica", [1, 2])
@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_a_state_comes_back_bit_for_bit_where_it_was(offload, replica, tmp_path):
    """With averages, random keys, scalars and a bias that is padded."""
    policy = jshard.Policy(min_shard_elements=0, ema_decay=0.9, offload=offload)
    fsdp = make_fsdp(replica, 8 // replica, policy)
    state = make_state(fsdp.abstract_state(Model, OPTIMIZER), 3)
    (copy,) = keep(copies_of(tmp_path, fsdp), state, 3)
    assert not copy.error
    copies = copies_of(tmp_path, fsdp)
    found = copies.find("it", [], 1)
    assert found.texts is not None
    assert (found.texts / "step").read_text() == "3"
    assert (found.step, found.note) == (3, "")
    check_same_shards(copies.restore(3), at_step(state, 3))


def test_frozen_parameters_are_kept_beside_adapters(tmp_path):
    fsdp, tx = jshard.FSDP(jshard.make_mesh()), optax.sgd(0.1)
    state = make_state(fsdp.abstract_state(Adapted, tx, wrt=nnx.LoRAParam))
    copies = copies_of(tmp_path, fsdp, Adapted, tx, wrt=nnx.LoRAParam)
    keep(copies, state, 1)
    assert copies.find("it", [], 1).step == 1
    check_same_shards(copies.restore(1), at_step(state, 1))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A folder with the copy of step 8, after that of step 4."""
    folder, fsdp = tmp_path_factory.mktemp("kept"), make_fsdp()
    state = make_state(abstract())
    assert [copy.error for copy in keep(copies_of(folder, fsdp), state, 4, 8)] == [
        ""
    ] * 2
    return folder


@pytest.fixture
def folder(kept, tmp_path) -> Path:
    """A copy of it, in the place that the run's folder gives it."""
    fsdp = make_fsdp()
    copies_of(tmp_path, fsdp)  # makes the folder
    (new,), (old,) = tmp_path.glob("jshard-*"), kept.glob("jshard-*")
    shutil.copytree(old, new, dirs_exist_ok=True)
    return new


def test_one_copy_is_kept_and_the_pages_of_the_one_before(folder):
    names = sorted(path.name for path in folder.glob("0/*"))
    assert names == ["8.bytes", "8.json", "spare"]


def find(folder: Path, fsdp=None, run="it", starts=(), least=1):
    return copies_of(folder.parent, fsdp or make_fsdp()).find(run, starts, least)


def test_damage_is_found(folder):
    flip_bit(folder / "0" / "8.bytes")
    found = find(folder)
    assert found.step is None
    assert found.note == (
        "the copy of step 8 on the hosts is not used: the part of process 0 is lost or "
        "damaged"
    )


@pytest.mark.parametrize(
    "break_it",
    [
        lambda files: (files / "8.json").unlink(),
        lambda files: (files / "8.json").write_text('{"run": "it"'),
        lambda files: (files / "8.json").write_text("[]"),
        lambda files: os.truncate(files / "8.bytes", 100),
        lambda files: (files / "8.bytes").unlink(),
    ],
    ids=["no label", "half a label", "another label", "cut", "no bytes"],
)
def test_what_a_kill_leaves_is_no_copy_and_is_removed(break_it, folder):
    break_it(folder / "0")
    assert find(folder).step is None
    assert list(folder.glob("*/*")) == []


def test_copies_of_another_mesh_are_not_used_and_it_is_said(folder):
    found = find(folder, make_fsdp(replica=2, fsdp=4))
    assert found.step is None
    assert found.note == "copies of step 8 on the hosts are of another mesh"


def test_copies_of_another_run_or_that_the_run_has_left_are_not_used(folder):
    assert find(folder, starts=[8]).step == 8
    shutil.copytree(folder, folder.parent / "saved")
    for run, starts in (("another", []), ("", []), ("it", [8, 7])):
        shutil.copytree(folder.parent / "saved", folder, dirs_exist_ok=True)
        found = find(folder, run=run, starts=starts)
        assert (found.step, found.note) == (None, "")
    shutil.copytree(folder.parent / "saved", folder, dirs_exist_ok=True)
    assert find(folder, least=9).step is None  # a checkpoint is newer


def test_too_little_room_is_refused_in_one_line(tmp_path):
    with (
        small_disk(tmp_path / "memory", "16k") as memory,
        pytest.raises(UserError) as caught,
    ):
        copies_of(memory, make_fsdp())
    message = str(caught.value)
    assert "the copies take 40.5 KiB on each host" in message
    assert "memory has 16.0 KiB left" in message
    assert "--config.checkpoint.local_dir=DIR" in message


def test_a_full_disk_costs_a_copy_alone(tmp_path):
    fsdp = make_fsdp()
    state = make_state(abstract())
    with small_disk(tmp_path / "memory", "64k") as memory:
        copies = copies_of(memory, fsdp)
        assert keep(copies, state, 1)[0].error == ""
        other = memory / "other"
        other.write_bytes(bytes(os.statvfs(memory).f_bavail * 4096))
        (failed,) = keep(copies, state, 2)
        assert failed.error == "process 0: No space left on device"
        other.unlink()
        assert copies.find("it", [], 1).step == 1
        assert keep(copies, state, 3)[0].error == ""
        assert copies.find("it", [], 1).step == 3


def test_folders_that_runs_left_a_day_ago_are_removed(tmp_path):
    old, new = (tmp_path / f"jshard-{os.getuid()}-{name}" for name in ("old", "new"))
    for path in (old, new):
        (path / "0").mkdir(parents=True)
    long_ago = time.time() - 100_000
    os.utime(old / "0", (long_ago, long_ago))
    os.utime(old, (long_ago, long_ago))
    copies_of(tmp_path, make_fsdp())
    assert not old.exists()
    assert new.exists()


def test_another_users_folder_is_refused(tmp_path):
    copies_of(tmp_path, make_fsdp())
    (folder,) = tmp_path.glob("jshard-*")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is another user's: give another folder"):
        copies_of(tmp_path, make_fsdp())


def test_a_stranger_gets_nothing(folder):
    said: list[str] = []
    secret = b"the job's secret"
    server = _Server("127.0.0.1", folder, secret, Strangers(said.append, "process 0"))
    address = server.socket.getsockname()
    request = {"owner": 0, "step": 8, "ranges": [[0, 100]]}
    with call(address, "copies", secret) as connection:
        connection.send(**request)
        part = np.empty(100, np.uint8)
        connection.receive_bytes(part)
    assert part.tobytes() == (folder / "0/8.bytes").read_bytes()[:100]
    for purpose, other in (("copies", b"another secret"), ("meeting", secret)):
        with pytest.raises(Stranger, match="has another secret"):
            call(address, purpose, other)
    with socket.create_connection(address) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        (greeting,) = connection.makefile("rb").readlines()
        assert greeting.startswith(b"jshard 1 ")
    line = "process 0: turned away 127.0.0.1, which does not know the job's secret"
    assert said == [line]
    server.shutdown()
    server.server_close()


def test_neighbors_are_on_the_next_host():
    assert neighbors((0, 0)) == [None, None]
    assert neighbors((0, 1, 2)) == [1, 2, 0]
    assert neighbors((0, 0, 1, 1)) == [2, 3, 0, 1]
    assert neighbors((0, 1, 0, 1)) == [1, 0, 3, 2]
    assert neighbors((0, 0, 1)) == [2, 2, 0]


# Whole runs.


def fail_at(step: int) -> str:
    """The recipe, with an error in the data of a step that no file remembers."""
    late = f"        if i == TOKENS[{step * 8}]:\n            raise KeyError('bad')\n"
    order = (
        "TOKENS = [int(i) for i in grain.MapDataset.range(512).seed(0).shuffle()"
        ".repeat()[:512]]\n"
    )
    head, body = RECIPE.split("def make_data", 1)
    body = body.replace("    def example(i):\n", f"    def example(i):\n{late}")
    return f"{head}{order}def make_data{body}"


def interrupted(folder: Path, **keys) -> Path:
    """A run of 12 steps that an error ended in step 12, after the copy of step 9."""
    keys |= {"checkpoint__local": 3, "checkpoint__local_dir": str(folder)}
    with pytest.raises(Exception, match="bad"):
        train(folder, recipe=fail_at(11), steps=12, eval_every=0, **keys)
    return folder / "run"


def test_a_run_goes_on_from_its_copy_and_removes_it_at_the_end(tmp_path, capsys):
    run = interrupted(tmp_path, checkpoint__every=50)  # before its first checkpoint
    before = read_metrics(run)
    assert [line["step"] for line in before] == list(range(1, 12))
    keys = {"checkpoint__local": 3, "checkpoint__local_dir": str(tmp_path)}
    assert len(list(tmp_path.glob("jshard-*/0/9.json"))) == 1
    (run / "metrics.jsonl").write_text(
        "".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:4])
    )
    capsys.readouterr()
    train(tmp_path, steps=12, eval_every=0, **keys)
    out = capsys.readouterr().out
    assert f"resuming {run} after step 9, from the hosts' copies" in out
    told = r"lacked lines of steps \d to 9: restored from the copy saved with the state"
    assert re.search(told, out), out
    assert re.search(
        r"2 x [\d.]+ KiB per process; they survive killed processes only", out
    )
    after = read_metrics(run)
    assert after[:-1] == before  # steps 10 and 11 are computed again
    assert after[-1]["step"] == 12
    assert list(tmp_path.glob("jshard-*")) == []


@pytest.mark.slow
def test_a_damaged_copy_costs_the_steps_since_the_checkpoint(tmp_path, capsys):
    run = interrupted(tmp_path)
    (data,) = tmp_path.glob("jshard-*/0/9.bytes")
    flip_bit(data)
    keys = {"checkpoint__local": 3, "checkpoint__local_dir": str(tmp_path)}
    train(tmp_path, steps=12, eval_every=0, **keys)
    told = "; the copy of step 9 on the hosts is not used: the part of process 0 is"
    assert f"resuming {run} after step 8{told}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_run_in_the_same_folder_does_not_start_from_the_old_ones_copies(
    tmp_path, capsys
):
    shutil.rmtree(interrupted(tmp_path))
    keys = {"checkpoint__local": 3, "checkpoint__local_dir": str(tmp_path)}
    run = train(tmp_path, steps=4, eval_every=0, **keys)
    assert "resuming" not in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]


def test_copies_without_checkpoints_are_refused(tmp_path):
    with pytest.raises(UserError, match="local=3: needs --config"):
        train(tmp_path, checkpoint__every=0, checkpoint__local=3)
