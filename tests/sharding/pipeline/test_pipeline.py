"""A pipelined step follows a plain one-device run, and does what it says it does."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from checkpoints import save_steps
from filled import filled
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.values.random_streams import DropoutCount
from jshard.storage.checkpoint.checkpointer import Checkpointer
from pipelines import Layers, mean, mesh_of, policy_of

BOUND = 1e-9


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    policy: dict[str, Any]
    variant: dict[str, Any]
    optimizer: str = "adamw"


ROWS = {
    "uneven stages beside shards": Case(
        {"pipe": 2, "fsdp": 2},
        {"accumulate": 2, "remat": "dots", "prefetch": True},
        {"dropout": True, "tied": True, "layers": 3},
    ),
    "two stages": Case({"pipe": 2, "fsdp": 1}, {}, {"layers": 2}),
    "three uneven stages, weights kept": Case(
        {"pipe": 3, "fsdp": 2},
        {"defer_scatter": True, "remat": jshard.Names("hidden")},
        {"batch": 48, "frozen": True, "tied": True, "dropout": True, "layers": 5},
        "muon",
    ),
    "four stages": Case({"pipe": 4, "fsdp": 1}, {"accumulate": 8}, {"layers": 4}),
    "replicas": Case(
        {"pipe": 2, "fsdp": 2, "replica": 2},
        {"unroll": True},
        {"padding": True, "dropout": True, "layers": 5},
    ),
    "padded parameters, two losses": Case(
        {"pipe": 2, "fsdp": 3},
        {"accumulate": 3, "remat": "none", "prefetch": True},
        {
            "batch": 36,
            "padding": True,
            "two_losses": True,
            "d_model": 10,
            "d_hidden": 7,
        },
    ),
    "fewer micro-batches than stages, replicas": Case(
        {"pipe": 2, "fsdp": 2, "replica": 2}, {"accumulate": 1}, {"layers": 4}
    ),
    "interleaved": Case(
        {"pipe": 2, "fsdp": 2},
        {"stages_per_device": 2, "reshard_after_forward": False},
        {"layers": 4, "dropout": True},
    ),
    "three uneven stages of three devices": Case(
        {"pipe": 3, "fsdp": 2},
        {"stages_per_device": 3, "accumulate": 3, "remat": "none"},
        {"batch": 36, "layers": 11, "dropout": True, "tied": True},
        "muon",
    ),
    "four devices, uneven": Case(
        {"pipe": 4, "fsdp": 1},
        {"stages_per_device": 2, "prefetch": True},
        {"layers": 9, "padding": True, "frozen": True},
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.slow  # test_each_axis_in_stages.py has a small model
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_parity(case):
    variant = parity.Variant(**case.variant)
    tx = parity.optimizer(case.optimizer, jshard.optim.per_layer)
    got = parity.train(variant, tx, mesh_of(**case.mesh), policy_of(**case.policy))
    want = parity.reference(variant, case.optimizer)
    assert parity.worst(got.metrics, want.metrics) <= BOUND
    assert parity.worst(got.params, want.params) <= BOUND


@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
def test_a_step_sums_over_replicas_at_its_end():
    """The units of a stage leave that to it, with one micro-batch too."""
    mesh = jshard.make_mesh(pipe=2, fsdp=2, replica=2)
    fsdp = jshard.FSDP(mesh, policy_of(1))
    state = fsdp.abstract_state(Layers, optax.sgd(0.1))
    places = Layout.of(state, fsdp.policy, mesh).places.values()
    assert {
        (place.gradient.sum_at, "replica" in place.gradient.sum_over)
        for place in places
    } == {("step", True)}


@pytest.mark.slow  # by default those of a model with gradients, below
def test_dropout_masks_are_those_of_any_mesh():
    """Bitwise: parity with one device would not see a mask of another example."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = jshard.Stack(
                lambda rngs: nnx.Linear(4, 4, rngs=rngs), 4, rngs=rngs
            )
            self.dropout = jshard.Dropout(0.5, rngs=rngs)

    def loss_fn(model, batch):
        x = model.dropout(batch["x"])
        kept = jnp.sum((x != 0) * batch["position"])
        y = model.blocks(batch["x"])
        return jshard.Mean(jnp.sum(y) * 0, y.size), {"kept": jshard.Mean(kept, 1)}

    def kept(accumulate, **sizes):
        fsdp = jshard.FSDP(mesh_of(**sizes), policy_of(accumulate))
        model = filled(lambda: Model(nnx.Rngs(0)))
        state = fsdp.from_model(model, optax.sgd(0.1))
        position = 2.0 ** np.arange(16).reshape(16, 1)  # a mask is a number
        batch = {"x": np.ones((16, 1)) * np.ones(4), "position": position}
        batch = {key: value.astype(np.float32) for key, value in batch.items()}
        _, metrics = fsdp.train_step(loss_fn, optax.sgd(0.1))(
            state, fsdp.shard_batch(batch)
        )
        return float(metrics["kept"]) * sizes["fsdp"] * sizes["replica"] * accumulate

    assert kept(2, pipe=2, fsdp=2, replica=2) == kept(1, fsdp=2, replica=2)


class Conditioned(nnx.Module):
    """Layers with units, integers and aux share an array, which goes past them, too."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            linear = functools.partial(nnx.Linear, 8, 8, param_dtype=jnp.float64)
            self.own, self.inner = linear(rngs=rngs), jshard.Unit(linear(rngs=rngs))
            self.dropout = jshard.Dropout(0.2, rngs=rngs)

        def __call__(self, stream: Any, given: jax.Array) -> Any:
            x, number = stream
            y = jnp.tanh(self.own(x) + self.inner(given) * number)
            return (x + self.dropout(y), number + 1), jnp.sum(y, axis=-1)

    def __init__(self, rngs: nnx.Rngs):
        self.given = nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs)
        self.blocks = jshard.Stack(self.Layer, 5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8))
        self.dropout = jshard.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        given = self.given(x)
        (y, number), aux = self.blocks((x * self.scale, jnp.int32(0)), given)
        y = y + given * number + (jnp.arange(1.0, 6.0) @ aux)[:, None]
        return self.dropout(y)


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:.*are in no Stack or Unit")
def test_what_layers_share_or_return_and_what_goes_past_them_have_gradients():
    tx, batch = optax.sgd(1.0), np.random.default_rng(0).normal(size=(16, 8))
    policy = policy_of(2, remat="none", stages_per_device=2)
    fsdp = jshard.FSDP(mesh_of(pipe=2, fsdp=2), policy)
    model = filled(lambda: Conditioned(nnx.Rngs(0)))
    state = fsdp.from_model(model, tx)
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any) -> Any:
        return mean(nnx.merge(graphdef, params, rest, copy=True), batch).compute()

    before = fsdp.fetch(state.params)
    want, grads = jax.device_get(loss(before))
    state, metrics = fsdp.train_step(mean, tx)(state, fsdp.shard_batch(batch))
    stepped = jax.tree.map(np.subtract, before, grads)
    assert parity.error(metrics["loss"], want) <= BOUND
    got = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(got, parity.by_path(stepped)) <= BOUND
    counts = jax.tree.leaves(nnx.filter_state(state.model_state, DropoutCount))
    assert [x.tolist() for x in counts] == [[1, 1, 1, 1, 1], 1]


# Models, precision and checkpoints.


SIZES = {
    "vocab_size": 40,
    "num_layers": 3,
    "num_heads": 4,
    "width": 16,
    "loss_chunk": 8,
    "param_dtype": jnp.float64,
    "attention": "xla",
}
MODELS = {
    "gpt": lambda rngs: GPT(GPTConfig(**SIZES, sequence_length=8), rngs=rngs),
    "llama": lambda rngs: Llama(
        LlamaConfig(**SIZES, num_kv_heads=2, hidden=24), rngs=rngs
    ),
}


def attention(
    q_BTNH, k_BTKH, v_BTKH, *, scale: float, is_causal: bool, implementation: str
) -> jax.Array:
    """In the dtype of its inputs (JAX's has its softmax in float32)."""
    assert is_causal
    assert implementation == "xla"
    T, N, _ = q_BTNH.shape[1:]
    k_BTNH, v_BTNH = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) * scale
    scores_BNTS = jnp.where(jnp.tri(T, dtype=bool), scores_BNTS, -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS), v_BTNH)


def cross_entropy(model: Any, batch: Any) -> Any:
    return model.loss(batch["tokens"], batch["targets"], batch["weights"])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MODELS)
def test_decoders_follow_themselves_on_one_device(name, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    variant = parity.Variant(batch=16, padding=True)
    batch = next(parity.batches(variant))
    batch |= {key: batch[key] % 40 for key in ("tokens", "targets")}
    fsdp, tx = jshard.FSDP(mesh_of(pipe=2, fsdp=2), policy_of(4)), optax.sgd(1.0)
    state = fsdp.init(MODELS[name], tx)
    graphdef, _, rest = nnx.split(MODELS[name](nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(jnp.asarray, fsdp.fetch(state.params))
    state, metrics = fsdp.train_step(cross_entropy, tx)(state, fsdp.shard_batch(batch))

    def loss(params: Any) -> Any:
        return cross_entropy(nnx.merge(graphdef, params, rest), batch).compute()

    want, grads = jax.jit(jax.value_and_grad(loss))(params)
    stepped = jax.tree.map(lambda p, g: p - g, params, grads)
    assert parity.error(metrics["loss"], want) <= BOUND
    got = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(got, parity.by_path(stepped)) <= BOUND


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
def test_bfloat16_and_averages_are_those_of_a_mesh_without_stages(tmp_path):
    """And checkpoints come back bit for bit on another number of stages."""
    variant = parity.Variant(batch=16, dropout=True, layers=4)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    in_bfloat16 = {
        "ema_decay": 0.9,
        "precision": jshard.Precision(param="float32", compute="bfloat16"),
    }

    make_model = parity.make_model(variant, False)

    def of(**sizes: int) -> tuple[jshard.FSDP, Any]:
        fsdp = jshard.FSDP(mesh_of(**sizes), policy_of(2, **in_bfloat16))
        return fsdp, fsdp.abstract_state(make_model, tx)

    def train(fsdp: jshard.FSDP) -> Any:
        def loss_fn(model: nnx.Module, batch: Any) -> Any:
            ((_, *mean),), _ = parity.sums(variant, model, batch)
            return jshard.Mean(*mean)

        state, step = fsdp.init(make_model, tx), fsdp.train_step(loss_fn, tx)
        metrics = {"loss": np.nan}
        for batch in itertools.islice(parity.batches(variant), 3):
            state, metrics = step(state, fsdp.shard_batch(batch))
        return state, float(metrics["loss"])

    fsdp, _ = of(pipe=2, fsdp=2)
    state, loss = train(fsdp)
    plain, _ = of(fsdp=4)
    other, expected = train(plain)
    assert loss == pytest.approx(expected, rel=2e-2)
    leaves = (
        jax.tree.leaves(x) for x in (fsdp.fetch(state.ema), plain.fetch(other.ema))
    )
    for got, want in zip(*leaves, strict=True):
        np.testing.assert_allclose(got, want, atol=0.05 * np.abs(want).max())

    save_steps(tmp_path, state, 3)
    again, abstract = of(pipe=4, fsdp=2)
    restored = Checkpointer(tmp_path).restore(abstract)
    pairs = fsdp.fetch(state.params), again.fetch(restored.params)
    for got, want in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_array_equal(got, want)
