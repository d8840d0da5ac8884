"""Optimizer state and parameters in host memory: in steps, checkpoints and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo
import jshard
import parity
from decoder import Sizes, bytes_in, loss_fn, make_decoder, make_fsdp
from jshard.plan.start_up import describe, traffic
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.system.errors import UserError

OFFLOADS = ("optimizer", "all")
BOUND = 1e-9


CLIP = optax.clip_by_global_norm(0.1)


def make_policy(offload: Any, **knobs: Any) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, offload=offload, **knobs)


class Layer(nnx.Module):
    """A matrix that is trained, and one that is not."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        values = np.sin(np.arange(128.0)).reshape(8, 16)
        self.trained, self.frozen = nnx.Param(values), nnx.Param(values[::-1])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ self.trained[...])
        return x + h @ jnp.tanh(self.frozen[...].T)


class SmallModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, 2, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))


@pytest.mark.usefixtures("x64")
def test_a_small_model_in_host_memory_trains_as_with_jax_and_optax():
    trained = nnx.All(nnx.Param, nnx.PathContains("trained"))
    tx = parity.optimizer("sgd")
    loss_fn = lambda model, x: jshard.Mean(jnp.sum(model(x) ** 2), len(x))
    x = np.random.default_rng(0).normal(size=(16, 8))
    model = SmallModel(nnx.Rngs(0))
    fsdp = make_fsdp(make_policy("all"), replica=2)
    state, step = fsdp.from_model(model, tx, wrt=trained), fsdp.train_step(loss_fn, tx)
    graphdef, params, rest = nnx.split(model, trained, ...)

    @jax.jit
    def plain_step(params: Any, opt_state: Any) -> tuple:
        loss = lambda params: loss_fn(nnx.merge(graphdef, params, rest), x).compute()
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        norm = optax.tree.norm(grads)
        return (value, norm), optax.apply_updates(params, updates), opt_state

    opt_state = jax.jit(tx.init)(params)
    for _ in range(3):
        (loss, norm), params, opt_state = plain_step(params, opt_state)
        state, metrics = step(state, fsdp.shard_batch(x))
        assert parity.error(metrics["loss"], loss) <= BOUND
        assert parity.error(metrics["grad_norm"], norm) <= BOUND
        assert norm > parity.CLIP  # so that it acts
    got = jax.tree.leaves(fsdp.fetch((state.params, state.opt_state)))
    for ours, theirs in zip(got, jax.tree.leaves((params, opt_state)), strict=True):
        assert parity.error(ours, theirs) <= BOUND


class FourLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


@pytest.mark.usefixtures("x64")
def test_muon_exchanges_the_layers_that_are_on_the_device_at_a_time_together():
    tx = jshard.optim.muon(0.1)
    loss_fn = lambda model, x: jshard.Mean(jnp.sum(model(x) ** 2), len(x))
    x = np.random.default_rng(0).normal(size=(16, 8))
    params, exchanges = [], []
    for layers in (1, 2, 4):
        fsdp = make_fsdp(make_policy("optimizer", offload_layers=layers))
        state = fsdp.from_model(FourLayers(nnx.Rngs(0)), tx)
        step = fsdp.train_step(loss_fn, tx)
        batch = fsdp.shard_batch(x)
        found = hlo.collectives(step.lower(state, batch).compile().as_text())
        exchanges.append(sum(c.times for c in found if c.kind == "all-to-all"))
        state, _ = step(state, batch)
        params.append(dict(enumerate(jax.tree.leaves(fsdp.fetch(state.params)))))
    # Two matrices of a layer, there and back, fill eight devices with four layers.
    assert exchanges[0] == 2 * exchanges[1] == 4 * exchanges[2] > 0
    for other in params[1:]:
        assert parity.worst(params[0], other) <= BOUND


def test_a_part_of_a_stack_that_does_not_divide_it_is_one_line():
    fsdp = make_fsdp(make_policy("optimizer", offload_layers=3))
    tx = optax.adam(1e-3)
    state = fsdp.from_model(FourLayers(nnx.Rngs(0)), tx)
    step = fsdp.train_step(lambda model, x: jshard.Mean(jnp.sum(model(x)), x.size), tx)
    with pytest.raises(UserError, match=r"offload_layers=3: the Stack 'layers' has 4"):
        step.lower(state, fsdp.shard_batch(np.ones((8, 8), np.float32)))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("offload", "name", "units", "mesh", "knobs"),
    [
        ("all", "sgd", False, (2, 4), {}),
        ("all", "adamw", True, (1, 8), {"reshard_after_forward": 2}),
        ("all", "adamw", True, (1, 8), {"offload_layers": 2}),
        ("all", "adamw", False, (2, 4), {"accumulate": 2}),
        ("optimizer", "lamb", False, (2, 4), {"reshard_after_forward": False}),
        ("all", "adamw", False, (1, 8), {"accumulate": 4, "defer_scatter": True}),
    ],
)
def test_training_follows_the_plain_run(offload, name, units, mesh, knobs):
    variant = parity.Variant(tied=units, frozen=not units, dropout=True)
    got = parity.train(
        variant,
        parity.optimizer(name, jshard.optim.per_layer),
        jshard.make_mesh(replica=mesh[0], fsdp=mesh[1]),
        make_policy(offload, **knobs),
        units,
    )
    want = parity.reference(variant, name, units)
    assert parity.worst(got.metrics, want.metrics) <= BOUND
    assert parity.worst(got.params, want.params) <= BOUND


def memory_kinds(tree: Any) -> set[str | None]:
    sharded = [x for x in jax.tree.leaves(tree) if not x.sharding.is_fully_replicated]
    return {x.sharding.memory_kind for x in sharded}


@pytest.mark.parametrize("offload", [None, *OFFLOADS])
def test_what_is_sharded_is_where_the_policy_says(offload):
    fsdp = make_fsdp(make_policy(offload, ema_decay=0.9))
    tx = optax.adamw(1e-3)
    state = fsdp.abstract_state(make_decoder(Sizes(layers=2)), tx)
    state_kind = "device" if offload is None else "pinned_host"
    params_kind = "pinned_host" if offload == "all" else "device"
    assert memory_kinds(state.opt_state) == memory_kinds(state.ema) == {state_kind}
    assert memory_kinds(state.params) == {params_kind}
    small = [x for x in jax.tree.leaves(state) if x.sharding.is_fully_replicated]
    assert {x.sharding.memory_kind for x in small} == {"device"}


TOKENS = jax.ShapeDtypeStruct((8, 8), jnp.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}
ADAM = optax.adam(1e-3)


@functools.cache  # what is traced for one test is there for the next
def started(tx: Any, offload: str | None) -> tuple:
    """(fsdp, abstract state, step) of a small decoder."""
    fsdp = make_fsdp(make_policy(offload))
    state = fsdp.abstract_state(make_decoder(Sizes(layers=2)), tx)
    return fsdp, state, fsdp.train_step(loss_fn, tx)


def trace(tx: Any, offload: str | None) -> Any:
    _, state, step = started(tx, offload)
    return step.trace(state, BATCH)


@pytest.mark.quick("all")
@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_step_writes_the_collectives_it_writes_without(offload):
    found = [
        traffic(trace(ADAM, kind).jaxpr.jaxpr, {"replica": 1, "fsdp": 8})
        for kind in (None, offload)
    ]
    assert found[0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_state_in_host_memory_evaluates_and_restores_where_it_was(tmp_path):
    fsdp = make_fsdp(make_policy("all", ema_decay=0.9))
    tx = optax.adamw(1e-3)
    make_model = make_decoder(Sizes(layers=2))
    state = fsdp.init(make_model, tx)
    tokens = np.zeros((8, 8), np.int32)
    batch = fsdp.shard_batch({"tokens": tokens, "targets": tokens})
    evaluate = fsdp.eval_step(loss_fn)
    loss = evaluate(state, batch).compute()["loss"]
    # As many updates as averages of equal values: the same model.
    assert evaluate(state.with_ema_params(), batch).compute()["loss"] == loss
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
    abstract = fsdp.abstract_state(make_model, tx)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract)
    same = jax.tree.map(lambda x, a: x.sharding == a.sharding, restored, abstract)
    assert all(jax.tree.leaves(same))
    assert evaluate(restored, batch).compute()["loss"] == loss


@pytest.mark.quick("own")
@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (ADAM, "the optimizer updates each layer independently of the others"),
        (jshard.optim.per_layer(optax.lamb(1e-3)), "the optimizer is in per_layer"),
    ],
    ids=["own", "per_layer"],
)
def test_the_note_says_what_is_in_host_memory(tx, said):
    fsdp, state, step = started(tx, "all")
    note = describe(fsdp, state, BATCH, step)
    sharded = [x for x in jax.tree.leaves(state.params) if len(x.sharding.spec)]
    held = 3 * 4 * sum(x.size for x in sharded) // 8  # with both moments
    assert f", {held / 1024:.1f} KiB per device in host memory" in note
    assert f"one layer of a Stack at a time: {said}" in note


# Errors.


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(CLIP, optax.adam(1e-3)),
        jshard.optim.chain(optax.adam(1e-3), CLIP),
        jshard.optim.bf16_moments(jshard.optim.chain(CLIP, optax.adam(1e-3))),
        optax.apply_if_finite(optax.adam(1e-3), 3),
    ],
    ids=["chain of optax", "clipped after", "rounded", "finite"],
)
def test_an_update_that_couples_layers_is_an_error_that_says_what_to_write(tx):
    with pytest.raises(
        UserError, match=r"policy.offload: the update of blocks depends on \w+"
    ) as error:
        trace(tx, "optimizer")
    assert "write jshard.optim.chain" in str(error.value)
    assert "jshard.optim.per_layer(optax.lamb(1e-3))" in str(error.value)


def test_a_mask_that_depends_on_the_number_of_layers_is_an_error():
    mask = lambda params: jax.tree.map(lambda p: p.shape[0] == 1, params)
    with pytest.raises(UserError, match="a mask or label chooses otherwise for one"):
        trace(optax.adamw(1e-3, mask=mask), "optimizer")


@pytest.mark.slow
def test_initial_values_in_host_memory_are_those_on_the_device():
    def leaves(offload: str | None) -> list[np.ndarray]:
        policy = make_policy(offload, ema_decay=0.9)
        state = make_fsdp(policy).init(make_decoder(Sizes()), optax.adam(1e-3))
        return list(map(np.asarray, jax.tree.leaves(state)))

    for got, want in zip(leaves("all"), leaves(None), strict=True):
        np.testing.assert_array_equal(got, want)


# By default tests/sharding/layout/test_initial_values.py has how they are divided.
@pytest.mark.slow
def test_initial_values_in_host_memory_are_made_a_few_at_a_time(monkeypatch):
    made, tx = [], optax.sgd(1e-3, momentum=0.9)
    jit = jax.jit

    def watched(fn: Any, **options: Any) -> Any:
        made.append(options["out_shardings"])
        return jit(fn, **options)

    monkeypatch.setattr("jshard.sharding.layout.values.initial_values.jax.jit", watched)
    abstract = make_fsdp(make_policy("all")).abstract_state(make_decoder(Sizes()), tx)
    make_fsdp(make_policy("all")).init(make_decoder(Sizes()), tx)
    hosted = bytes_in("pinned_host", abstract)
    largest = max(bytes_in("pinned_host", x) for x in jax.tree.leaves(abstract))
    # One more for what stays on the device.
    assert hosted / largest <= len(made) - 1 < 2 * hosted / largest + 1


def test_an_unknown_offload_is_an_error_with_the_possible_ones():
    with pytest.raises(UserError, match=r"'disk' must be None, optimizer or all"):
        jshard.Policy(offload="disk")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "policy",
    [
        jshard.Policy(offload="all"),
        jshard.Policy(remat=jshard.Offload("hidden")),
        jshard.Policy(overrides={"blocks": {"remat": jshard.Offload("hidden")}}),
    ],
)
def test_devices_without_host_memory_are_an_error_that_names_what_they_have(
    monkeypatch, policy
):
    class Memory:
        kind = "device"

    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda self: [Memory()])
    with pytest.raises(
        UserError, match=r"'pinned_host', which .* lacks \(it has device"
    ):
        make_fsdp(policy)


@pytest.mark.parametrize(("made", "used"), [("all", None), (None, "optimizer")])
def test_a_state_of_another_policy_is_an_error(made, used):
    tx = optax.adam(1e-3)
    state = make_fsdp(make_policy(made)).abstract_state(make_decoder(Sizes()), tx)
    step = make_fsdp(make_policy(used)).train_step(loss_fn, tx)
    tokens = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    with pytest.raises(UserError, match=f"policy.offload is {used!r}"):
        step.trace(state, {"tokens": tokens, "targets": tokens})
