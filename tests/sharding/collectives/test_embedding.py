"""Embeddings are looked up where their columns are: values, gradients, traffic."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hlo
import jshard
from decoder import policies
from filled import filled
from h100 import h100s
from jshard.sharding.collectives.embedding import is_cheaper
from jshard.sharding.layout.placement import Placement, Sharding
from jshard.sharding.settings.mesh import BATCH
from parity import make_mesh

VOCAB, WIDTH, BATCH_SIZE, TIME = 96, 16, 32, 8
TOKENS = BATCH_SIZE * TIME // 8  # of a device


class Plain(nnx.Embed):
    """An embedding of another type is gathered like any parameter."""


class Model(nnx.Module):
    """An embedding and what makes its gradients differ by token."""

    def __init__(self, rngs, kind=nnx.Embed, vocab=VOCAB, width=WIDTH, **kwargs):
        self.embed = jshard.Unit(kind(vocab, width, rngs=rngs, **kwargs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jshard.Mean:
    error = model(batch["tokens"]) - batch["targets"]
    return jshard.Mean(jnp.sum(error**2), batch["tokens"].size)


def random_batch(vocab: int = VOCAB, width: int = WIDTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (BATCH_SIZE, TIME)
    # Some often, others never, and negative ones, which count from the end.
    tokens = rng.integers(-3, vocab, shape) // rng.integers(1, 5, shape)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": rng.normal(size=(*shape, width)),
    }


STEPS = 3


def first_table() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(VOCAB, WIDTH))


@functools.cache
def train_plainly() -> Any:
    """As ``train``, on one device, without jshard."""
    tx, batch = optax.adamw(0.1), random_batch()

    def mean(table: jax.Array) -> jax.Array:
        error = jnp.take(table, batch["tokens"], axis=0) - batch["targets"]
        return jnp.sum(error**2) / batch["tokens"].size

    @jax.jit
    def step(table: jax.Array, opt_state: Any) -> Any:
        loss, grad = jax.value_and_grad(mean)(table)
        updates, opt_state = tx.update(grad, opt_state, table)
        return loss, optax.apply_updates(table, updates), opt_state

    before = first_table()
    table, losses = jax.device_put(before), []
    opt_state = tx.init(table)
    for _ in range(STEPS + 1):
        before = np.asarray(table)
        loss, table, opt_state = step(table, opt_state)
        losses.append(float(loss))
    return np.array(losses), before, before[batch["tokens"]]


def train(policy: jshard.Policy, mesh: Any) -> Any:
    """(losses, table, predictions) after some steps of AdamW."""
    fsdp, tx = jshard.FSDP(mesh, policy), optax.adamw(0.1)
    model = filled(lambda: Model(nnx.Rngs(0), param_dtype=jnp.float64))
    model.embed.embedding.set_value(jax.device_put(first_table()))
    state = fsdp.from_model(model, tx)
    step, batch = fsdp.train_step(loss_fn, tx), fsdp.shard_batch(random_batch())
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    predict = fsdp.predict_step(lambda model, batch: model(batch["tokens"]))
    means = fsdp.eval_step(loss_fn)(state, batch).compute()
    (table,) = jax.tree.leaves(fsdp.fetch(state.params))
    return np.array([*losses, means["loss"]]), table, np.asarray(predict(state, batch))


def lower(policy: jshard.Policy, mesh: Any, kind: Any = nnx.Embed, **sizes: Any) -> Any:
    """A step; and its abstract table."""
    fsdp, tx = jshard.FSDP(mesh, policy), optax.sgd(0.1)
    state = fsdp.abstract_state(functools.partial(Model, kind=kind, **sizes), tx)
    sharding = NamedSharding(mesh, BATCH)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
        ),
        random_batch(width=sizes.get("width", WIDTH)),
    )
    step = fsdp.train_step(loss_fn, tx)
    (table,) = jax.tree.leaves(state.params)
    return step.lower(state, batch), table


@functools.cache
def compiled(accumulate: int = 1, defer: bool = False, **sizes: Any) -> str:
    """The program of a step on eight shards."""
    policy = policies(accumulate=accumulate, defer_scatter=defer)
    return hlo.compile(lower(policy, make_mesh(1, 8), **sizes)[0]).as_text()


def moved(**kwargs: Any) -> dict[str, int]:
    """Bytes that a device sends in a step, by kind, less scalars."""
    found = hlo.collectives(compiled(**kwargs))
    sent: dict[str, int] = {}
    for c in found:
        if not hlo.is_number(c.operands[0]):
            key = f"{c.kind} {c.operands[0].dtype}"
            sent[key] = sent.get(key, 0) + c.wire_bytes
    return sent


@pytest.mark.quick("(2, 4)-{'accumulate'")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("mesh", "knobs"),
    [
        ((1, 8), {}),
        ((2, 4), {"accumulate": 4}),
        ((2, 4), {}),
        ((1, 8), {"defer_scatter": True, "accumulate": 2}),
        ((8, 1), {}),
        ((1, 8), {"remat": "none", "reshard_after_forward": False, "ema_decay": 0.9}),
    ],
    ids=str,
)
def test_looked_up_rows_train_as_on_one_device(mesh, knobs):
    want = train_plainly()
    got = train(policies(**knobs), make_mesh(*mesh))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_a_table_is_sharded_along_its_columns_where_these_divide():
    fsdp = jshard.FSDP(make_mesh(1, 8), policies())

    def spec(**sizes: Any) -> P:
        make = functools.partial(Model, **sizes)
        (table,) = jax.tree.leaves(fsdp.abstract_state(make, optax.sgd(0.1)).params)
        return table.sharding.spec

    assert spec() == P(None, "fsdp")
    assert spec(width=12) == P("fsdp")
    assert spec(width=12, vocab=90) == P(None, "fsdp")  # padded
    assert spec(kind=Plain) == P("fsdp")


def test_a_look_up_moves_rows_in_place_of_the_table():
    rows = 4 * TOKENS * WIDTH * 7 // 8
    ids = 4 * TOKENS * 8 * 7 // 8
    assert moved() == {
        "all-to-all s32": ids,
        "all-to-all f32": 2 * rows,
    }
    # Twice and back for every micro-batch: as many bytes.
    assert moved(accumulate=4) == moved()


@pytest.mark.parametrize(
    ("knobs", "sizes"),
    [
        ({}, {"vocab": TOKENS}),  # as many rows as tokens
        ({}, {"kind": Plain}),
        ({"defer": True}, {}),
    ],
    ids=str,
)
def test_a_table_is_gathered_where_that_moves_less(knobs, sizes):
    table = 4 * sizes.get("vocab", VOCAB) * WIDTH * 7 // 8
    want = {"all-gather f32": table, "reduce-scatter f32": table}
    assert moved(**knobs, **sizes) == want


def test_a_frozen_table_has_no_gradient_to_send():
    mesh = make_mesh(1, 8)

    class Frozen(Model):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, tokens):
            return super().__call__(tokens) * self.scale

    fsdp, tx = jshard.FSDP(mesh, policies()), optax.sgd(0.1)
    trained = nnx.All(nnx.Param, lambda path, _: "scale" in path)
    state = fsdp.abstract_state(Frozen, tx, wrt=trained)
    batch = jax.tree.map(jnp.asarray, random_batch())
    lowered = fsdp.train_step(loss_fn, tx).lower(state, batch)
    found = hlo.collectives(hlo.compile(lowered).as_text())
    exchanges = [c.operands[0].dtype for c in found if c.kind == "all-to-all"]
    assert sorted(exchanges) == ["f32", "s32"]


@pytest.mark.parametrize(
    ("precision", "rows", "gradients"),
    [
        (jshard.Precision(), "f32", "f32"),
        (jshard.Precision(compute="bfloat16"), "bf16", "bf16"),
        (jshard.Precision(gather="bfloat16"), "bf16", "f32"),
        (jshard.Precision(gather="int8"), "f32", "f32"),
        (jshard.Precision(compute="bfloat16", reduce="float32"), "bf16", "bf16"),
        (jshard.Precision(reduce="float16", sum="float32"), "f32", "f16"),
    ],
    ids=str,
)
def test_rows_and_their_gradients_travel_in_their_dtypes_and_add_up_in_float32(
    precision, rows, gradients
):
    policy = policies(precision=precision)
    text = lower(policy, make_mesh(1, 8), vocab=8 * VOCAB)[0].as_text("hlo")
    found = re.findall(r"= (\w+)\[\d[^\]]*\]\S* all-to-all\(", text)
    assert sorted(found) == sorted(["s32", rows, gradients])
    assert set(re.findall(r"= (\w+)\[\S+ scatter\(", text)) == {"f32"}


@pytest.mark.parametrize(("devices", "exchanged"), [(1, False), (2, True), (8, True)])
def test_a_few_rows_are_exchanged_unless_one_device_has_them_all(devices, exchanged):
    found = []

    def run(shard_VC, ids_T):
        found.append(is_cheaper(shard_VC, Placement(Sharding(-1)), ids_T))
        return ids_T

    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
    args = jnp.ones((VOCAB, WIDTH)), jnp.arange(3)
    jax.make_jaxpr(jax.shard_map(run, mesh=mesh, **specs))(*args)
    assert found == [exchanged]


@pytest.mark.quick("both")
@pytest.mark.parametrize(
    "precision",
    [
        jshard.Precision(compute="bfloat16"),
        jshard.Precision(gather="float16"),
        jshard.Precision(compute="float16", gather="bfloat16"),
    ],
    ids=["compute", "gather", "both"],
)
def test_rows_have_the_values_of_a_gathered_table(precision):
    def rows(kind: type) -> np.ndarray:
        fsdp = jshard.FSDP(jshard.make_mesh(), policies(precision=precision))
        make = functools.partial(Model, kind=kind)
        state = fsdp.from_model(filled(lambda: make(nnx.Rngs(0))), optax.identity())
        predict = fsdp.predict_step(lambda model, batch: model(batch["tokens"]))
        got = predict(state, fsdp.shard_batch(random_batch()))
        assert got.dtype == (precision.compute or jnp.float32)
        return np.asarray(got.astype(jnp.float32))

    np.testing.assert_array_equal(rows(nnx.Embed), rows(Plain))


def whole_tables(text: str, vocab: int, width: int) -> list[str]:
    sizes = f"{vocab},{width}|{width},{vocab}"
    return re.findall(rf"\w+\[(?:{sizes})\]", text)


def test_neither_the_table_nor_its_gradient_is_ever_whole():
    assert not whole_tables(compiled(), VOCAB, WIDTH)
    assert whole_tables(compiled(kind=Plain), VOCAB, WIDTH)


@pytest.mark.h100
@pytest.mark.parametrize("replica", [1, 2])
def test_a_gpu_holds_no_whole_table_and_waits_for_no_weights(replica):
    mesh = h100s(8, replica=replica)
    policy = policies(precision=jshard.Precision(compute="bfloat16"))
    options = {"xla_gpu_all_gather_combine_threshold_bytes": 1 << 30}
    lowered, _ = lower(policy, mesh, vocab=4096, width=128)
    text = lowered.compile(options).as_text()
    assert not whole_tables(text, 4096, 128)
    # But for sums of a few numbers: the loss, and what it counts.
    kinds = {c.kind for c in hlo.collectives(text) if c.operands[0].size > 8}
    assert kinds == {"all-to-all"} | ({"all-reduce"} if replica > 1 else set())
    columns = 128 * replica // 8
    assert f"f32[4096,{columns}]" in " ".join(re.findall(r"= (\S+) scatter\(", text))
