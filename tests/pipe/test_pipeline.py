"""A pipelined step follows a plain one-device run, and does what it says it does."""

import dataclasses
import functools
import itertools
import warnings
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
from jshard.checkpoint.checkpointer import Checkpointer
from jshard.errors import UserError
from jshard.layout.batch import abstract_batch
from jshard.layout.state_layout import Layout
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.t5 import T5
from jshard.models.t5_config import T5Config
from jshard.nn.dropout import DropoutCount
from jshard.pipe.schedule import most_alive, one_forward_one_backward
from jshard.plan.start_up import traffic

BOUND = 1e-9


def mesh_of(**sizes: Any) -> jax.sharding.Mesh:
    number = int(np.prod(list(sizes.values())))
    return jshard.make_mesh(**sizes, devices=jax.devices()[:number])


def policy_of(accumulate: int = 4, **fields: Any) -> jshard.Policy:
    return jshard.Policy(accumulate=accumulate, min_shard_elements=0, **fields)


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
@pytest.mark.quick("uneven stages beside shards")
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
    assert {(place.sum_at, "replica" in place.sum_over) for place in places} == {
        ("step", True)
    }


def traced(mesh: Any, policy: jshard.Policy, variant: parity.Variant) -> Any:
    """The traced step of ``Sharded``, on one of its batches."""
    fsdp, tx = jshard.FSDP(mesh, policy), optax.sgd(0.1)

    def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> Any:
        terms, _ = parity.sums(variant, model, batch)
        return sum(weight * jshard.Mean(*mean) for weight, *mean in terms)

    state = fsdp.abstract_state(parity.make_model(variant, False), tx)
    batch = abstract_batch(next(parity.batches(variant)), mesh)
    return fsdp.train_step(loss_fn, tx).trace(state, batch)


def counts(mesh: Any, policy: jshard.Policy, layers: int) -> dict[tuple, tuple]:
    step = traced(mesh, policy, parity.Variant(layers=layers))
    found = traffic(step.jaxpr.jaxpr, dict(mesh.shape))
    return {kind: (x.count, x.wire_bytes) for kind, x in found.items()}


BLOCK, OUTSIDE = 6, 5  # parameters of a layer, and of all else
WIDTH, HIDDEN, WORDS = 16, 32, parity.VOCABULARY


KEPT = {"reshard_after_forward": False}
COUNTED = {
    "a gather each time": {},
    "one": {"defer_scatter": True},
    "one of layers": KEPT,
    "interleaved": {"stages_per_device": 2},
    "interleaved, one": {"stages_per_device": 2} | KEPT,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.quick("interleaved, one")
@pytest.mark.parametrize("fields", COUNTED.values(), ids=COUNTED)
def test_counts_are_those_of_a_device_and_of_moves(fields):
    got = counts(mesh_of(pipe=2, fsdp=2), policy_of(4, **fields), layers=4)
    alone = {key: x for key, x in fields.items() if key != "stages_per_device"}
    # A device, that were both ends.
    both, one = (
        counts(mesh_of(fsdp=2), policy_of(4, **alone), layers=n) for n in (2, 1)
    )
    layer = 2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH
    outside = 2 * WORDS * WIDTH + 2 * WIDTH + WORDS
    # A stage's device has half of what it is sent already: parameters, then gradients.
    to_stages, outside = 2 * layer * 8 // 4, outside * 8 // 4

    def expected(kind: str) -> tuple[int, int]:
        count, nbytes = both.get((kind, "float64"), (0, 0))
        if kind != "all-to-all" and fields.get("reshard_after_forward") is False:
            count += BLOCK - 2 * (count - one[kind, "float64"][0])
            nbytes += layer * 8 - 2 * (nbytes - one[kind, "float64"][1])
        return count, nbytes

    gathers, gathered = expected("all-gather")
    scatters, scattered = expected("reduce-scatter")
    exchanges, exchanged = expected("all-to-all")
    weights = 16 * parity.TIME * 8 // 2
    stages = fields.get("stages_per_device", 1)
    parts = 2 if stages == 1 else 1  # of a backward: at most a stage's layers
    sends = 2 * (4 * stages + 2 - 1) * (1 + parts)
    carry = 32 // 2 // 4 * parity.TIME * WIDTH * 8
    found = {kind: got[kind, "float64"] for kind, of in got if of == "float64"}
    assert found | {"ids": got["all-gather", "int64"]} == {
        "all-gather": (gathers + OUTSIDE + 1, gathered + outside + weights),
        "reduce-scatter": (scatters + OUTSIDE, scattered + outside),
        "all-to-all": (exchanges + 2 * BLOCK, exchanged + 2 * to_stages),
        "send": (sends, sends * carry),
        "ids": (2, 2 * weights),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_no_more_micro_batches_are_alive_than_stages():
    """By XLA's account, of twice as many as without need."""
    rows, number = 64, 8

    def temporaries(stages: int, micro: int, **fields: int) -> int:
        variant = parity.Variant(layers=4 * stages, batch=rows * micro)
        policy = policy_of(micro, **fields)
        step = traced(mesh_of(pipe=stages, fsdp=1), policy, variant)
        return step.lower().compile().memory_analysis().temp_size_in_bytes

    carry = rows * parity.TIME * WIDTH * 8
    two, many, four = temporaries(2, 4), temporaries(2, number), temporaries(4, number)
    assert many - two < carry  # but for the tokens of a longer batch
    # Each of two more micro-batches keeps the inputs of a stage's four layers.
    assert 2 * 3.5 * carry < four - many < 2 * 4.5 * carry
    assert one_forward_one_backward(4, number, 3).activations == 4
    # Interleaved, each keeps the inputs of two layers, and six more are alive.
    two, many, four = (
        temporaries(stages, micro, stages_per_device=2)
        for stages, micro in ((2, 4), (2, number), (4, number))
    )
    assert most_alive(4, number, 2) - most_alive(2, number, 2) == 6
    assert many - two < carry
    assert 6 * 1.75 * carry < four - many < 6 * 2.25 * carry


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
        state = fsdp.init(Model, optax.sgd(0.1))
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
        self.blocks = jshard.Stack(self.Layer, 3, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        given = self.given(x)
        (y, number), aux = self.blocks((x * self.scale, jnp.int32(0)), given)
        return y + given * number + (jnp.arange(1.0, 4.0) @ aux)[:, None]


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:.*are in no Stack or Unit")
def test_what_layers_share_or_return_and_what_goes_past_them_have_gradients():
    tx, batch = optax.sgd(1.0), np.random.default_rng(0).normal(size=(16, 8))
    fsdp = jshard.FSDP(mesh_of(pipe=2, fsdp=2), policy_of(2, remat="none"))
    state = fsdp.init(Conditioned, tx)
    graphdef, _, rest = nnx.split(Conditioned(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any) -> Any:
        return mean(nnx.merge(graphdef, params, rest, copy=True), batch).compute()

    before = jax.tree.map(jnp.asarray, fsdp.fetch(state.params))
    want, grads = jax.value_and_grad(loss)(before)
    state, metrics = fsdp.train_step(mean, tx)(state, fsdp.shard_batch(batch))
    stepped = jax.tree.map(lambda p, g: p - g, before, grads)
    assert parity.error(metrics["loss"], want) <= BOUND
    got = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(got, parity.by_path(stepped)) <= BOUND
    counts = jax.tree.leaves(nnx.filter_state(state.model_state, DropoutCount))
    assert [x.tolist() for x in counts] == [[1, 1, 1]]


# What it does not do.


class Layers(nnx.Module):
    """Equal layers, in one Stack or several."""

    blocks0: jshard.Stack

    def __init__(self, rngs: nnx.Rngs, layer: Any = None, stacks: int = 1):
        layer = layer or (lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        for i in range(stacks):
            setattr(self, f"blocks{i}", jshard.Stack(layer, 4, rngs=rngs))
        self.head = jshard.Unit(nnx.Linear(8, 8, rngs=rngs))

    def __call__(self, x: jax.Array) -> Any:
        return self.head(self.blocks0(x))


class WithAux(nnx.Linear):
    def __call__(self, x: jax.Array) -> Any:  # pyright: ignore
        return super().__call__(x), x


class Norm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


def mean(model: Any, batch: Any) -> Any:
    y = model(batch)
    return jshard.Mean(jnp.sum(y**2), y.size)


def trace(
    make_model: Any = Layers,
    loss_fn: Any = mean,
    mesh: dict[str, int] | None = None,
    **policy: Any,
) -> None:
    fsdp, tx = (
        jshard.FSDP(mesh_of(**mesh or {"pipe": 2}), policy_of(**policy)),
        optax.sgd(0.1),
    )
    state = fsdp.abstract_state(make_model, tx)
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    fsdp.train_step(loss_fn, tx).trace(state, abstract_batch(batch, fsdp.mesh))


def of_layers(layer: Any) -> Any:
    return lambda rngs: Layers(rngs, layer)


REFUSED = {
    "no Stack": ({"make_model": Norm}, "one jshard.Stack, and the model has none"),
    "two Stacks": (
        {"make_model": lambda rngs: Layers(rngs, stacks=2)},
        "the model has blocks0, blocks1",
    ),
    "T5": (
        {"make_model": lambda rngs: T5(T5Config(width=8, hidden=8), rngs=rngs)},
        "the model has decoder, encoder",
    ),
    "stages": ({"mesh": {"pipe": 8}, "accumulate": 16}, "exceed the 4 layers"),
    "no pipeline": (
        {"mesh": {"fsdp": 2}, "stages_per_device": 2},
        "the mesh has no pipeline",
    ),
    "interleaved stages": (
        {"mesh": {"pipe": 2}, "stages_per_device": 4},
        "8 stages exceed the 4 layers .* choose at most 4",
    ),
    "groups": (
        {"mesh": {"pipe": 2}, "stages_per_device": 2, "accumulate": 3},
        "accumulate=3 is no multiple",
    ),
    "aux": (
        {"make_model": of_layers(lambda rngs: WithAux(8, 8, rngs=rngs))},
        "aux of all layers of 'blocks0' crosses stages .* 64 values beside the 16",
    ),
    "carry": (
        {"make_model": of_layers(lambda rngs: nnx.Linear(8, 4, rngs=rngs))},
        "a stacked layer turns",
    ),
    "state of layers": ({"make_model": of_layers(Norm)}, "changes its state"),
    "reshard": ({"reshard_after_forward": 2}, "once a step and keeps them"),
    "first_k": ({"first_k": 1}, "policy.first_k=1"),
    "root": ({"reshard_root": True}, "policy.reshard_root=True"),
    "gather": (
        {"precision": jshard.Precision(gather="int8")},
        "policy.precision.gather",
    ),
    "twice": (
        {"loss_fn": lambda model, batch: mean(model, model(batch))},
        "must call its Stack once",
    ),
    "in a transform": (
        {"loss_fn": lambda model, x: mean(model, jax.vmap(model)(x[:, None])[:, 0])},
        "a transform",
    ),
    "print": (
        {"loss_fn": lambda m, x: (jax.debug.print("{}", x.sum()), mean(m, x))[1]},
        "prints or calls back",
    ),
    "count": (
        {"loss_fn": lambda model, x: jshard.Mean(1.0, jnp.sum(model(x) > 0))},
        "a count or weight of the loss",
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_pipeline_does_not_do_is_one_line(given, words):
    with pytest.raises(UserError, match=words) as error:
        trace(**given)
    assert "\n" not in str(error.value)


def test_a_large_bubble_is_a_warning():
    with pytest.warns(
        match="accumulate=1 a device is idle for 50% .*; with 2, for 33%"
    ):
        trace(accumulate=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(accumulate=2)


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
