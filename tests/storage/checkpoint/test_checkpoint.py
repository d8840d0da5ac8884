"""Checkpoints: whole or ignored, verified before they are read, on any mesh."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from flax import nnx

import jshard
from checkpoints import (
    OPTIMIZER,
    POLICY,
    Model,
    Wider,
    at_step,
    check_equal,
    data_file,
    flip_bit,
    loss_fn,
    make_fsdp,
    make_state,
    on_mesh,
    restore_parameters,
    save_steps,
    values,
)
from filled import filled
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer, Save
from jshard.storage.checkpoint.restore import find_damage, find_step
from jshard.system.compat.versions import versions

MESHES = [(1, 8), (1, 4), (1, 2), (1, 1), (2, 4), (4, 2), (8, 1)]


# On any mesh.


@pytest.mark.quick("4-2")
@pytest.mark.parametrize(("replica", "shards"), MESHES)
def test_a_state_comes_back_bit_for_bit_on_any_mesh(replica, shards, state, saved):
    abstract = make_fsdp(replica, shards).abstract_state(Model, OPTIMIZER)
    restored = Checkpointer(saved).restore(abstract)
    check_equal(restored, at_step(state, 3))
    leaves = jax.tree.leaves(restored), jax.tree.leaves(abstract)
    for got, want in zip(*leaves, strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


@pytest.mark.quick("2-4")
@pytest.mark.parametrize(("replica", "shards"), MESHES[1:])
def test_what_any_mesh_saved_comes_back_on_eight_devices(
    replica, shards, state, abstract, tmp_path
):
    there = make_fsdp(replica, shards).abstract_state(Model, OPTIMIZER)
    save_steps(tmp_path, on_mesh(state, there), 5)
    check_equal(Checkpointer(tmp_path).restore(abstract), at_step(state, 5))


def test_a_state_comes_back_in_another_memory(state, saved, abstract):
    def on_host(x):
        sharding = x.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    abstract = dataclasses.replace(
        abstract, opt_state=jax.tree.map(on_host, abstract.opt_state)
    )
    restored = Checkpointer(saved).restore(abstract)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored.opt_state)}
    assert kinds == {"pinned_host"}
    check_equal(restored, at_step(state, 3))


def test_parameters_come_back_in_another_dtype_and_the_user_is_told(state, saved):
    policy = dataclasses.replace(POLICY, precision=jshard.Precision(param=jnp.bfloat16))
    abstract = make_fsdp(policy=policy).abstract_state(Model, OPTIMIZER)
    with pytest.warns(UserWarning, match="are read as bfloat16, saved as float32"):
        restored = Checkpointer(saved).restore(abstract)
    got, want = values(restored), values(state)
    name = "params.layers.linear.kernel"
    assert got[name].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[name], want[name].astype(jnp.bfloat16))


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.head = jshard.Unit(nnx.Linear(16, 8, rngs=rngs))
        self.noise = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.noise(x))


def test_steps_go_on_while_a_state_is_saved_and_go_on_from_it_bit_for_bit(tmp_path):
    fsdp, optimizer = make_fsdp(), optax.sgd(0.1, momentum=0.9)
    step = fsdp.train_step(loss_fn, optimizer)
    batch = fsdp.shard_batch(np.ones((16, 16), np.float32))
    state = fsdp.from_model(filled(lambda: Small(nnx.Rngs(0))), optimizer)
    abstract = fsdp.abstract_state(Small, optimizer)
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        wanted = {}
        for i in range(3):
            wanted[i] = values(state)
            checkpointer.save(state)
            state, _ = step(state, batch)
    for i, want in wanted.items():
        got = values(checkpointer.restore(abstract, step=i))
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{i} {name}")
    again, _ = step(checkpointer.restore(abstract, step=1), batch)
    for name, array in values(again).items():
        np.testing.assert_array_equal(array, wanted[2][name], err_msg=name)


# What is kept.


@pytest.mark.quick("{'keep': 1, 'keep_every': 4")  # test_keeping.py has them all
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [5, 6]),
        ({"keep": 1, "keep_every": 3}, [3, 6]),
        ({"keep": 1, "best": "loss"}, [3, 6]),
        ({"keep": 1, "best": "loss", "highest": True}, [6]),
        ({"keep": 1, "best": "accuracy"}, [6]),
        ({"keep": 1, "keep_every": 4, "best": "loss"}, [3, 4, 6]),
    ],
    ids=str,
)
def test_the_last_the_regular_and_the_best_are_kept(options, kept, state, tmp_path):
    save_steps(tmp_path, state, *range(2, 7), **options)
    assert Checkpointer(tmp_path).steps() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(s) for s in kept]
    assert not any(find_damage(tmp_path / str(step)) for step in kept)


def test_a_step_that_is_saved_again_is_replaced(state, abstract, tmp_path):
    save_steps(tmp_path, state, 1)
    other = dataclasses.replace(state, params=jax.tree.map(jnp.ones_like, state.params))
    save_steps(tmp_path, other, 1)
    check_equal(Checkpointer(tmp_path).restore(abstract), at_step(other, 1))


def test_a_checkpoint_describes_itself(saved):
    about = metadata.read(saved / "3")
    assert about["step"] == 3
    assert about["mesh"] == {"replica": 1, "fsdp": 8}
    assert about["versions"]["jax"] == jax.__version__
    assert about["metrics"] == {"loss": 0.0}
    kernel = about["arrays"]["params.layers.linear.kernel"]
    assert kernel["shape"] == [4, 16, 16]
    assert (kernel["dtype"], kernel["layer_dims"]) == ("float32", 1)
    assert about["arrays"]["model_state.noise.rngs.key"]["random"]
    assert not about["arrays"]["model_state.mean"]["random"]


def test_a_checkout_that_nobody_installed_knows_its_version(monkeypatch):
    def version(name):
        if name == "jshard":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    installed = importlib.metadata.version("jshard")
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions()
    assert (found["jshard"], found["jax"]) == (installed, "1.0")
    assert jshard.__version__ == installed


def test_names_hold_for_every_mesh_and_policy():
    names = {
        tuple(metadata.arrays_by_name(fsdp.abstract_state(Model, OPTIMIZER)))
        for fsdp in (
            make_fsdp(),
            make_fsdp(8, 1),
            make_fsdp(policy=jshard.Policy(remat="none", ema_decay=0.5)),
        )
    }
    assert len(names) == 1
    assert "opt_state.1.stacked.layers.inner_states.muon" in " ".join(names.pop())


def test_large_shards_are_stored_in_parts_and_stacks_in_layers(
    state, abstract, tmp_path, monkeypatch
):
    monkeypatch.setattr("jshard.storage.checkpoint.stored_arrays._CHUNK", 64)
    save_steps(tmp_path, state, 1)
    check_equal(Checkpointer(tmp_path).restore(abstract), at_step(state, 1))
    layers = chunk_shape(tmp_path / "1", "params.layers.linear.kernel")
    assert layers[0] == 1
    assert np.prod(layers) * 4 <= 64
    kernel = chunk_shape(tmp_path / "1", "params.head.kernel")
    assert 1 < np.prod(kernel) <= 64 // 4


def chunk_shape(step: Path, name: str) -> Any:
    base = next(step.rglob("d")).parent
    kvstore = {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{name}/"}
    store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
    return store.chunk_layout.read_chunk.shape


# Another run's parameters.


def test_another_runs_parameters_start_a_run_without_its_optimizer(state, saved):
    fsdp = make_fsdp(2, 4)
    new = make_state(fsdp.abstract_state(Model, OPTIMIZER), 7)
    fresh = values(new)
    started = restore_parameters(saved, new)
    got, other = values(started), values(state)
    for name, array in got.items():
        kind = name.split(".")[0]
        if kind == "ema":
            want = other[name.replace("ema", "params", 1)]
        elif kind == "params" or name == "model_state.mean":
            want = other[name]
        else:
            want = fresh[name]
        np.testing.assert_array_equal(array, want, err_msg=name)


def test_another_runs_parameters_start_a_run_with_its_optimizer(state, saved, abstract):
    started = restore_parameters(saved / "2", make_state(abstract, 0), optimizer=True)
    got, other = values(started), values(state)
    for name in got:
        if name.split(".")[0] in ("params", "opt_state", "ema"):
            np.testing.assert_array_equal(got[name], other[name], err_msg=name)
    assert int(started.step) == 0


def test_trained_parameters_may_be_frozen_in_the_next_run(state, saved):
    head = nnx.All(nnx.Param, lambda path, _: "head" in path)
    abstract = make_fsdp().abstract_state(Model, OPTIMIZER, wrt=head)
    started = restore_parameters(saved, make_state(abstract, 0))
    got, other = values(started), values(state)
    np.testing.assert_array_equal(
        got["frozen.layers.linear.kernel"], other["params.layers.linear.kernel"]
    )


def test_parameters_of_another_model_are_refused_with_every_difference(saved):
    fresh = make_state(make_fsdp().abstract_state(Wider, OPTIMIZER), 0)
    with pytest.raises(jshard.UserError, match=r"lacks params.tail.bias, .*shape"):
        restore_parameters(saved, fresh)
    values(fresh)  # and nothing of the new state is lost


def test_a_user_may_mean_a_run_its_checkpoints_or_a_step(folder, tmp_path):
    for path in (tmp_path, folder, folder / "3"):
        assert find_step(path) == folder / "3"
    flip_bit(data_file(folder / "3"))
    with pytest.warns(UserWarning, match="step 2 is used instead"):
        assert find_step(tmp_path) == folder / "2"
    with pytest.raises(jshard.UserError, match="3 is damaged"):
        find_step(folder / "3")
    with pytest.raises(jshard.UserError, match="does not exist"):
        find_step(tmp_path / "nothing")
    with pytest.raises(jshard.UserError, match="holds no checkpoint"):
        find_step(tmp_path / "checkpoints" / "3" / "state" / "state")


def test_a_state_that_cannot_be_described_fails_a_save_and_no_step(
    tmp_path, state, monkeypatch
):
    def fail(*_: Any) -> Any:
        raise TypeError("of no dtype\nthat there is")

    monkeypatch.setattr("jshard.storage.checkpoint.frozen.bit_sums", fail)
    reports: list[Save] = []
    with Checkpointer(tmp_path, report=reports.append) as checkpointer:
        checkpointer.save(at_step(state, 1), frozen_from="org/base@main")
        checkpointer.save(at_step(state, 2))
    assert [bool(save.error) for save in reports] == [True, False]
    assert "of no dtype" in reports[0].error
    assert checkpointer.steps() == [2]


def test_frozen_parameters_that_are_left_out_are_taken_from_the_state(tmp_path):
    fsdp, base = make_fsdp(), tmp_path / "base"
    only_head: Any = lambda path, _: "head" in path
    abstract = fsdp.abstract_state(Model, OPTIMIZER, wrt=only_head)
    state = make_state(abstract)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state, frozen_from=base)
        checkpointer.wait()
        told = f"read the frozen ones from {base} before it"
        with pytest.raises(jshard.UserError, match=told):
            checkpointer.restore(abstract)
        there = dataclasses.replace(abstract, frozen=state.frozen)
        check_equal(checkpointer.restore(there), state)
        others = jax.tree.map(jnp.ones_like, state.frozen)
        with pytest.raises(jshard.UserError, match=r"frozen\..* differ; give"):
            checkpointer.restore(dataclasses.replace(abstract, frozen=others))


def test_values_of_64_bits_come_back_where_only_a_context_allows_them(tmp_path):
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs)

    with jax.enable_x64(True):  # which threads do not see
        fsdp, optimizer = jshard.FSDP(jshard.make_mesh()), optax.sgd(0.1)
        state = fsdp.init(make, optimizer)
        with jshard.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(state)
            checkpointer.wait()
            restored = checkpointer.restore(fsdp.abstract_state(make, optimizer))
            check_equal(state, restored)


def test_a_state_without_shardings_is_refused(tmp_path):
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh()), optax.sgd(0.1)
    state = fsdp.init(lambda rngs: nnx.Linear(8, 8, rngs=rngs), optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        checkpointer.wait()
        with pytest.raises(jshard.UserError, match=r"step.*: no sharding to read it"):
            checkpointer.restore(jax.eval_shape(lambda: state))
