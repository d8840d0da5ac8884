"""Checkpoints that Orbax wrote without jshard: read exactly on any mesh, or refused."""

import functools
import json
import shutil
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
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1

import jshard
from filled import filled
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.orbax.folder import open_orbax
from jshard.storage.checkpoint.orbax.matching import match
from jshard.storage.checkpoint.restore import find_newest, find_step
from jshard.storage.hub.parameters import find_parameters

PAGE = Path(__file__).parents[3] / "docs/how_to/orbax.md"
WIDTH, OUT = 5, 3  # which no mesh of 2, 4 or 8 divides
POLICY = jshard.Policy(min_shard_elements=0)
TX = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(
        optax.linear_schedule(1e-2, 0.0, 20),
        mask=lambda params: jax.tree.map(lambda x: jnp.ndim(x) > 1, params),
    ),
)
BATCHES = np.random.default_rng(1).normal(size=(5, 8, WIDTH))
NO_UNITS = "ignore:100% of the parameters"
pytestmark = [pytest.mark.filterwarnings(NO_UNITS)]


class Model(nnx.Module):
    """Layers in a list, a statistic, and masks that are drawn."""

    def __init__(self, rngs: nnx.Rngs):
        wide: dict[str, Any] = {"param_dtype": np.float64, "rngs": rngs}
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, **wide) for _ in range(2)])
        self.dropout = jshard.Dropout(0.2, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH, np.float64))
        self.head = nnx.Linear(WIDTH, OUT, **wide)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        mean = jshard.pmean(jnp.mean(x, axis=0))
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * mean)
        return self.head(self.dropout(x) - self.mean[...])


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.shape[0])


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
            plain_step(model, optimizer, jnp.asarray(x))
        folder = tmp_path_factory.mktemp("plain") / "both"
        save(folder, nnx.state((model, optimizer)))
        saved = jax.tree.map(jnp.array, nnx.state((model, optimizer)))
        losses = [plain_step(model, optimizer, jnp.asarray(x)) for x in BATCHES[3:]]
        nnx.update((model, optimizer), saved)
    return model, optimizer, folder, [float(x) for x in losses]


def save(folder: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def make_fsdp(devices: int = 8) -> jshard.FSDP:
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    return jshard.FSDP(mesh, POLICY, units=(nnx.Linear,))


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


def manager(folder: Path, tree: Any) -> None:
    with ocp.CheckpointManager(folder) as steps:
        steps.save(1, args=ocp.args.StandardSave(jax.tree.map(jnp.zeros_like, tree)))
        steps.save(8, args=ocp.args.StandardSave(tree))


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
    like = jax.tree.structure(TX.init(params))
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
    fsdp = make_fsdp()
    abstract = fsdp.abstract_state(Model, TX)
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
    random = lambda x: jnp.asarray(9 * draw.random(x.shape)).astype(x.dtype)
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


# What does not fit.


class Other(Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.tail = self.head
        del self.head


class Wide(Model):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = nnx.Linear(WIDTH, 7, param_dtype=np.float64, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "tx", "keys", "said"),
    [
        (
            Other, TX, {},
            "compared with 0 there, it lacks tail.bias, tail.kernel; it has unexpected "
            "head.bias, head.kernel$",
        ),
        (Wide, TX, {}, r"params.head.kernel has shape \(5, 3\), not \(5, 7\)"),
        (
            Model, optax.lion(1e-3), {},
            r"of another optimizer: compared with 1.opt_state.1 there, it has "
            r"unexpected 0.nu.* 2.count",
        ),
        (
            Model, optax.sgd(1e-3, momentum=0.9), {},
            "has no state of this optimizer: .*restore_optimizer=False",
        ),
        (Model, TX, {"params_at": "1"}, "params_at='1' is no place of the parameters"),
        (Model, TX, {"step": 4}, "is one checkpoint: leave out step=4"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_listed_both_ways(model, tx, keys, said, plain, x64):
    *_, folder, _ = plain
    with pytest.raises(jshard.UserError, match=said):
        jshard.restore_orbax(folder, make_fsdp(), model, tx, **keys)


def test_of_several_places_one_is_asked_for(plain, tmp_path, x64):
    model, *_ = plain
    tree = {"params": nnx.state(model), "ema": nnx.state(model), "opt": {"lr": 0.1}}
    save(tmp_path / "two", tree)
    fsdp = make_fsdp()
    keys: dict[str, Any] = {"restore_optimizer": False}
    with pytest.raises(
        jshard.UserError, match=r"2 places fit the parameters, ema, params: "
    ):
        jshard.restore_orbax(tmp_path / "two", fsdp, Model, TX, **keys)
    with pytest.warns(UserWarning, match=r"not read: opt, params \(\d+ arrays\)"):
        jshard.restore_orbax(tmp_path / "two", fsdp, Model, TX, params_at="ema", **keys)


def test_folders_that_are_no_whole_checkpoints_of_orbax_are_refused(
    plain, tmp_path, x64
):
    model, *_ = plain
    fsdp = make_fsdp()

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(jshard.UserError, match=said):
            find_parameters(folder, abstract)

    abstract = fsdp.abstract_state(Model, TX)
    with pytest.raises(jshard.UserError, match="holds no checkpoint of Orbax's"):
        jshard.restore_orbax(tmp_path, fsdp, Model, TX)
    with pytest.raises(jshard.UserError, match="nowhere does not exist"):
        jshard.restore_orbax(tmp_path / "nowhere", fsdp, Model, TX)
    WRITERS["no OCDBT"](tmp_path / "files", nnx.to_pure_dict(nnx.state(model)))
    shutil.copytree(tmp_path / "files", tmp_path / "8.orbax-checkpoint-tmp")
    refused(tmp_path / "8.orbax-checkpoint-tmp", "that Orbax did not complete")
    (tmp_path / "files/layers.0.kernel/0.0").unlink()  # zarr would read zeros
    source = find_parameters(tmp_path / "files", abstract).orbax
    assert source is not None
    with pytest.raises(jshard.UserError, match=r"is damaged: .*layers\.0\.kernel"):
        source.load(abstract)
    shutil.rmtree(tmp_path / "files/layers.0.kernel")
    refused(tmp_path / "files", r"is damaged: .*layers\.0\.kernel")
    (tmp_path / "files/_METADATA").write_text("{}")
    refused(tmp_path / "files", "_METADATA lists no arrays as Orbax does")


# Whose folder it is.


def test_folders_of_orbax_are_never_called_damaged_or_to_be_removed(plain, tmp_path):
    model, *_ = plain
    manager(tmp_path / "steps", nnx.state(model))
    v1.save(tmp_path / "one", nnx.state(model))  # its item is named as jshard's arrays
    for look, path, said in [
        (find_newest, "steps", r"holds checkpoints of Orbax's \(steps 1, 8\)"),
        (find_step, "steps", "holds checkpoints of Orbax's"),
        (find_step, "steps/8", "is a checkpoint of Orbax's"),
        (find_step, "one", "is a checkpoint of Orbax's"),
        (jshard.Checkpointer, "steps", "holds checkpoints of Orbax's"),
    ]:
        with pytest.raises(jshard.UserError, match=said) as error:
            look(tmp_path / path)
        assert "restore_orbax" in str(error.value)
        for word in ("damaged", "remove"):
            assert word not in str(error.value)
    assert sorted(x.name for x in (tmp_path / "steps").iterdir()) == ["1", "8"]


def test_orbax_alone_reads_a_checkpoint_and_its_folder_is_told_from_orbaxs(
    plain, tmp_path, x64
):
    model, *_ = plain
    fsdp = make_fsdp()
    with jshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(fsdp.from_model(model, TX))
    with pytest.raises(jshard.UserError, match=rf"of jshard's: give {tmp_path}/0$"):
        jshard.restore_orbax(tmp_path / "0/state", fsdp, Model, TX)
    with pytest.raises(jshard.UserError, match="holds no checkpoint of Orbax's"):
        jshard.restore_orbax(tmp_path, fsdp, Model, TX)
    # The lines of the page, without jshard.
    text = PAGE.read_text()
    lines = text[text.index("def read(") : text.index("params, tree =")]
    names = {"json": json, "jax": jax, "v1": v1}
    names |= {"flatten_dict": flatten_dict, "unflatten_dict": unflatten_dict}
    exec(lines, names)
    tree = names["read"](tmp_path / "0")
    kinds = {"params": nnx.Param, "model_state": nnx.Not(nnx.Param)}
    for kind, of_kind in kinds.items():
        for path, variable in nnx.to_flat_state(nnx.state(model, of_kind)):
            x = functools.reduce(lambda node, key: node[str(key)], path, tree[kind])
            want = variable.get_value()
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert bool(jnp.all(x == want))
