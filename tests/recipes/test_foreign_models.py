"""Models of other projects, as they ship: the numbers of one device without jshard."""

import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from parity import make_mesh

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # their own
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

VOCABULARY, TIME, EXAMPLES, STEPS = 64, 8, 16, 3
TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def llama3():
    """tunix's Llama 3, of which the model itself is no pytree."""
    always_shard = nnx.using_eager_sharding()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip(
            "tunix.models.llama3.model",
            reason="needs google-tunix: pip install 'jshard[compat]'",
            exc_type=ImportError,
        )
    yield module
    nnx.use_eager_sharding(always_shard)  # importing it turns this off


def make_llama3(llama3: Any, tied: bool) -> Callable[[nnx.Rngs], nnx.Module]:
    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=tied,
    )

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = llama3.Llama3(config, rngs=rngs)
        # Its feed-forwards start as zeros, which have no gradient.
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            value = variable.get_value()
            noise = jax.random.normal(rngs.params(), value.shape, jnp.float64)
            variable.set_value(value + noise / 20)
        return model

    return make


def loss_fn(model: Any, batch: Any) -> jshard.Mean:
    examples, time = batch["tokens"].shape
    positions = jnp.broadcast_to(jnp.arange(time), (examples, time))
    causal = jnp.tril(jnp.ones((time, time), bool))
    mask = jnp.broadcast_to(causal, (examples, time, time))
    logits, _ = model(batch["tokens"], positions, None, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jshard.Mean(jnp.sum(losses), losses.size)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, VOCABULARY, (EXAMPLES, TIME))
    return [{"tokens": draw(), "targets": draw()} for _ in range(STEPS)]


@pytest.fixture(scope="module")
def qwix():
    return pytest.importorskip(
        "qwix", reason="needs qwix, which google-tunix installs: jshard[compat]"
    )


class WideNumpy:
    """jax.numpy, with float64 where a model insists on float32."""

    float32 = jnp.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


def with_lora(qwix: Any, model: Any) -> Any:
    provider = qwix.LoraProvider(
        module_path=".*attn.*",
        rank=4,
        alpha=8.0,
        lora_b_initializer=nnx.initializers.normal(0.1),  # zeros would hide errors
    )
    tokens = jnp.zeros((1, TIME), jnp.int32)
    mask = jnp.ones((1, TIME, TIME), bool)
    inputs = (tokens, jnp.arange(TIME)[None], None, mask)
    return qwix.apply_lora_to_model(model, provider, *inputs, rngs=nnx.Rngs(1))


def test_qwix_lora_on_tunix_llama3_trains_as_on_one_device(llama3, qwix, monkeypatch):
    monkeypatch.setattr(llama3, "jnp", WideNumpy())
    make = make_llama3(llama3, tied=False)
    model, plain = (with_lora(qwix, make(nnx.Rngs(0))) for _ in range(2))
    policy = jshard.Policy(min_shard_elements=0)
    units = (llama3.DecoderLayer, llama3.Embedder)
    fsdp = jshard.FSDP(make_mesh(1, 8), policy, units=units)
    state = fsdp.from_model(model, TX, wrt=nnx.LoRAParam)
    frozen = [x for x in jax.tree.leaves(state.frozen) if x.ndim > 1]
    assert len(frozen) > 10
    assert all("fsdp" in x.sharding.spec for x in frozen)

    type(plain)._pytree__is_pytree = False  # or Flax sees no parameter of it
    graphdef, params, rest = nnx.split(plain, nnx.LoRAParam, ...)
    opt_state = TX.init(params)

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        return loss_fn(nnx.merge(graphdef, params, rest, copy=True), batch).compute()

    step = fsdp.train_step(loss_fn, TX)
    for batch in batches():
        state, metrics = step(state, fsdp.shard_batch(batch))
        value, grads = loss(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    trained = fsdp.fetch(state.params)
    for got, want in zip(
        jax.tree.leaves(trained), jax.tree.leaves(params), strict=True
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 * np.abs(want).max())


def train_plainly(make: Callable) -> tuple[list[float], Any]:
    """(losses, parameters) on one device, with Flax and optax alone."""
    model = make(nnx.Rngs(jax.random.key(0)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            return loss_fn(
                nnx.merge(graphdef, params, rest, copy=True), batch
            ).compute()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    losses, opt_state = [], TX.init(params)
    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params


def train_sharded(
    make: Callable, mesh: tuple[int, int], units: tuple[type, ...]
) -> tuple[list[float], Any]:
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(make_mesh(*mesh), policy, units=units)
    state = fsdp.init(make, TX)
    step = fsdp.train_step(loss_fn, TX)
    losses = []
    for batch in batches():
        state, metrics = step(state, fsdp.shard_batch(batch))
        losses.append(float(metrics["loss"]))
    return losses, fsdp.fetch(state.params)


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_tunix_llama3_trains_as_on_one_device(llama3, monkeypatch, tied, in_float32):
    # It computes norms, angles and softmaxes in float32, whatever its parameters are.
    if not in_float32:
        wide = types.SimpleNamespace(**vars(jnp) | {"float32": jnp.float64})
        monkeypatch.setattr(llama3, "jnp", wide)
    make = make_llama3(llama3, tied)
    want_losses, want_params = train_plainly(make)
    bound = 1e-6 if in_float32 else 1e-9
    layers = (llama3.DecoderLayer, llama3.Embedder)
    heads = () if tied else (llama3.Einsum,)
    places = [((1, 8), (*layers, *heads)), ((2, 4), layers if tied else ())]
    for mesh, units in places[: 1 if in_float32 else 2]:
        losses, params = train_sharded(make, mesh, units)
        np.testing.assert_allclose(losses, want_losses, rtol=bound)
        for got, want in zip(
            jax.tree.leaves(params), jax.tree.leaves(want_params), strict=True
        ):
            assert got.dtype == want.dtype == np.float64
            np.testing.assert_allclose(
                got, want, rtol=0, atol=bound * np.abs(want).max()
            )
