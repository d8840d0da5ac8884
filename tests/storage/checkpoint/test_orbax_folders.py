"""Checkpoints that Orbax wrote without jshard: read exactly on any mesh, or refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

import jshard
from filled import filled
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.orbax.folder import open_orbax
from jshard.storage.checkpoint.orbax.matching import match
from saved_by_orbax import (
    BATCHES,
    OUT,
    POLICY,
    TX,
    WIDTH,
    Model,
    loss_fn,
    make_fsdp,
    manager,
    save,
    wanted,
)

NO_UNITS = "ignore:100% of the parameters"
pytestmark = [pytest.mark.filterwarnings(NO_UNITS)]


@nnx.jit
def plain_step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """A step of Flax's own, without jshard."""
    loss = lambda model: jnp.mean(jnp.sum(model(x) ** 2, axis=-1))
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(model, optimizer) after three steps, their checkpoint, and the next losses."""
    with jax.enable_x64(True):
        model = filled(lambda: Model(nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        for x in BATCHES[:3]:
            plain_step(model, optimizer, x)
        folder = tmp_path_factory.mktemp("plain") / "both"
        save(folder, nnx.state((model, optimizer)))
        saved = jax.tree.map(lambda x: x, nnx.state((model, optimizer)))
        losses = [plain_step(model, optimizer, x) for x in BATCHES[3:]]
        nnx.update((model, optimizer), saved)
    return model, optimizer, folder, [float(x) for x in losses]


def trained(fsdp: jshard.FSDP, state: Any, tx: Any = TX, loss: Any = loss_fn) -> Any:
    """The losses of the next two batches."""
    step, losses = fsdp.train_step(loss, tx), []
    for x in BATCHES[3:]:
        state, metrics = step(state, fsdp.shard_batch(x))
        losses.append(float(metrics["loss"]))
    return losses


# Going on.


@pytest.mark.quick("8")
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_model_and_its_nnx_optimizer_go_on_as_in_the_loop_of_flax(
    devices, plain, x64
):
    *_, folder, losses = plain
    fsdp = make_fsdp(devices)
    state = jshard.restore_orbax(folder, fsdp, Model, TX)
    assert int(state.step) == 3
    np.testing.assert_allclose(trained(fsdp, state), losses, rtol=1e-9)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide: Any = {"dtype": np.float64, "param_dtype": np.float64}
        return linen.Dense(OUT, **wide)(jnp.tanh(linen.Dense(WIDTH, **wide)(x)))


@pytest.mark.slow  # above, its tree is read bit for bit
@pytest.mark.parametrize("whole", [False, True], ids=["params", "variables"])
def test_linens_train_state_goes_on_as_in_its_loop(whole, tmp_path, x64):
    module = LinenModel()
    variables = module.init(jax.random.key(0), BATCHES[0])
    apply = (
        (lambda params, x: module.apply(params, x))
        if whole
        else (lambda params, x: module.apply({"params": params}, x))
    )
    params = variables if whole else variables["params"]
    plain = TrainState.create(apply_fn=apply, params=params, tx=TX)

    @jax.jit
    def step(state, x):
        def loss(params: Any) -> Any:
            outputs: Any = apply(params, x)
            return jnp.mean(jnp.sum(outputs**2, axis=-1))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for x in BATCHES[:3]:
        plain, _ = step(plain, x)
    save(tmp_path / "linen", plain)
    losses = []
    for x in BATCHES[3:]:
        plain, value = step(plain, x)
        losses.append(float(value))

    def make(rngs):
        units = (linen.Dense,)
        return jshard.linen.Model(module, BATCHES[0], units=units, rngs=rngs)

    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY)
    state = jshard.restore_orbax(tmp_path / "linen", fsdp, make, TX)
    assert int(state.step) == 3
    np.testing.assert_allclose(trained(fsdp, state), losses, rtol=1e-9)


# Every form, bit for bit.


def checkpointer(**options: Any) -> Any:
    return lambda folder, tree: ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(**options)
    ).save(folder, tree)


def older(folder: Path, tree: Any) -> None:
    """As before Orbax marked a checkpoint's own folder."""
    manager(folder, tree)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        for file in folder.rglob(name):
            file.unlink()


def items(folder: Path, tree: Any) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    with ocp.CheckpointManager(folder, options=options) as steps:
        given = {name: ocp.args.PyTreeSave(x) for name, x in tree.items()}
        more = ocp.args.JsonSave({"lr": 1})
        steps.save(8, args=ocp.args.Composite(**given, config=more))


def v1_training(folder: Path, tree: Any) -> None:
    with v1.training.Checkpointer(folder) as steps:
        steps.save(8, tree)


WRITERS = {
    "StandardCheckpointer": save,
    "PyTreeCheckpointer": lambda folder, x: ocp.PyTreeCheckpointer().save(folder, x),
    "zarr3": checkpointer(use_zarr3=True),
    "no OCDBT": checkpointer(use_ocdbt=False),
    "no OCDBT, zarr3": checkpointer(use_ocdbt=False, use_zarr3=True),
    "CheckpointManager": manager,
    "CheckpointManager, older": older,
    "CheckpointManager, items": items,
    "v1 save": v1.save,
    "v1 Checkpointer": v1_training,
}


def trees(model: Any, optimizer: Any) -> dict[str, tuple[Any, bool]]:
    """What people save, by how they call it, and whether the optimizer is in it."""
    params = nnx.state(model, nnx.Param)
    statistics = nnx.state(model, nnx.BatchStat)
    opt_state = nnx.state(optimizer, nnx.optimizer.OptState)["opt_state"]
    like = jax.tree.structure(jax.eval_shape(TX.init, params))
    of_optax = jax.tree.unflatten(like, jax.tree.leaves(opt_state))
    return {
        "nnx.state": (nnx.state(model), False),
        "pure dict": (nnx.to_pure_dict(nnx.state(model)), False),
        "(model, optimizer)": ((nnx.state(model), nnx.state(optimizer)), True),
        "model and optimizer": (
            {"model": nnx.state(model), "optimizer": nnx.state(optimizer)},
            True,
        ),
        "params, batch_stats, opt_state": (
            {"params": params, "batch_stats": statistics, "opt_state": opt_state},
            True,
        ),
        "a tree of optax": (
            {"params": params, "stats": statistics, "opt": of_optax, "lr": 0.1},
            True,
        ),
    }


TREES = ("nnx.state", "pure dict", "(model, optimizer)", "a tree of optax")
TREES += ("params, batch_stats, opt_state",)
FORMS = [("StandardCheckpointer", tree) for tree in TREES]
FORMS += [(writer, "model and optimizer") for writer in WRITERS]


@pytest.mark.quick(
    "CheckpointManager-model",
    "CheckpointManager, older",
    "no OCDBT, zarr3",
    "v1 save",
    "StandardCheckpointer-(model",
    "PyTreeCheckpointer",
    "StandardCheckpointer-params",
)
@pytest.mark.parametrize(("writer", "tree"), FORMS)
def test_every_form_is_read_bit_for_bit_as_orbax_does(
    writer, tree, plain, tmp_path, x64
):
    model, optimizer, *_ = plain
    saved, has_optimizer = trees(model, optimizer)[tree]
    WRITERS[writer](tmp_path / "saved", saved)
    fsdp, abstract = wanted()
    found = match(open_orbax(tmp_path / "saved"), abstract, optimizer=has_optimizer)
    arrays = metadata.replace_arrays(abstract, found.load(abstract))
    state = nnx.state(model)
    check(fsdp, arrays.params, nnx.filter_state(state, nnx.Param))
    others = nnx.filter_state(arrays.model_state, nnx.BatchStat)
    check(fsdp, others, nnx.filter_state(state, nnx.BatchStat))
    if has_optimizer:
        check(fsdp, arrays.opt_state, nnx.state(optimizer)["opt_state"])
    # Flax's own number, where it is saved, whatever the folder is called.
    assert found.step == (3 if "optimizer" in tree else None)
    assert ("lr" in found.left) == (tree == "a tree of optax")


def check(fsdp: jshard.FSDP, got: Any, want: Any) -> None:
    got, want = jax.tree.leaves(fsdp.fetch(got)), jax.tree.leaves(want)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, np.asarray(w))


by_rank = lambda params: jax.tree.map(lambda x: "ab"[jnp.ndim(x) > 1], params)
OPTIMIZERS = {
    "MultiSteps": optax.MultiSteps(TX, 2).gradient_transformation(),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "partition": optax.partition({"a": optax.sgd(0.1, 0.9), "b": TX}, by_rank),
    "muon": optax.contrib.muon(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "apply_if_finite": optax.apply_if_finite(TX, 3),
}


@pytest.mark.quick("MultiSteps", "partition", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_tree_is_read_as_flax_and_orbax_flatten_it(
    name, plain, tmp_path, x64
):
    model, tx = plain[0], OPTIMIZERS[name]
    draw = np.random.default_rng(2)
    random = lambda x: np.asarray(9 * draw.random(x.shape), x.dtype)
    opt = jax.tree.map(random, nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param)))
    save(tmp_path / "saved", {"model": nnx.state(model), "optimizer": opt})
    fsdp = make_fsdp()
    abstract = fsdp.abstract_state(Model, tx)
    found = match(open_orbax(tmp_path / "saved"), abstract, optimizer=True)
    state = metadata.replace_arrays(abstract, found.load(abstract))
    got = metadata.arrays_by_name(fsdp.fetch(state))
    want = {
        ".".join(map(str, ("opt_state", *path))): np.asarray(leaf.get_value())
        for path, leaf in nnx.to_flat_state(opt["opt_state"])
        if jax.tree.leaves(leaf)  # not masked
    }
    assert {*want} == {name for name in got if name.startswith("opt_state.")}
    for key, x in want.items():
        np.testing.assert_array_equal(got[key], x)


@pytest.mark.slow  # run/test_orbax_runs.py has a manager
def test_a_step_of_a_manager_can_be_chosen_and_a_stateless_optimizer_has_none(
    plain, tmp_path, x64
):
    model, *_ = plain
    manager(tmp_path / "steps", nnx.state(model))
    fsdp = make_fsdp()
    give = {"restore_optimizer": False, "step": 1}
    state = jshard.restore_orbax(tmp_path / "steps", fsdp, Model, TX, **give)
    assert not any(map(np.any, jax.tree.leaves(fsdp.fetch(state.params))))
    state = jshard.restore_orbax(tmp_path / "steps", fsdp, Model, optax.sgd(0.1))
    assert int(state.step) == 8
    check(fsdp, state.params, nnx.state(model, nnx.Param))
    with pytest.raises(jshard.UserError, match=r"no step 2; there are: \[1, 8\]"):
        jshard.restore_orbax(tmp_path / "steps", fsdp, Model, TX, step=2)
