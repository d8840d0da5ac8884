"""Linen models: their layers in nnx.bridge.ToNNX, each a unit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jshard
from filled import filled
from jshard.plan.start_up import describe
from parity import make_mesh, make_update

pytestmark = pytest.mark.usefixtures("x64")

TX = optax.sgd(0.1, momentum=0.9)
VOCABULARY, TIME, WIDTH, LAYERS, EXAMPLES = 64, 8, 16, 2, 16
WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
POLICY = jshard.Policy("none", min_shard_elements=0)


# A language model in Linen, as Flax's lm1b and wmt examples have it.


class MlpBlock(linen.Module):
    @linen.compact
    def __call__(self, x_BTD):
        h_BTF = linen.gelu(linen.Dense(2 * WIDTH, **WIDE)(x_BTD))
        return linen.Dense(x_BTD.shape[-1], **WIDE)(h_BTF)


class EncoderBlock(linen.Module):
    @linen.compact
    def __call__(self, x_BTD):
        mask = linen.make_causal_mask(x_BTD[..., 0])
        h_BTD = linen.LayerNorm(**WIDE)(x_BTD)
        attention = linen.MultiHeadDotProductAttention(
            num_heads=2, use_bias=False, deterministic=True, **WIDE
        )
        x_BTD = x_BTD + attention(h_BTD, h_BTD, mask=mask)
        return x_BTD + MlpBlock()(linen.LayerNorm(**WIDE)(x_BTD))


class Transformer(linen.Module):
    def setup(self):
        self.embed = linen.Embed(VOCABULARY, WIDTH, **WIDE)
        self.blocks = [EncoderBlock() for _ in range(LAYERS)]
        self.head = linen.Dense(VOCABULARY, **WIDE)

    def __call__(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


# The same for jshard, a gather a layer.


def wrap(module: linen.Module, rngs: nnx.Rngs, *inputs: Any) -> Any:
    return nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(*inputs)


class Wrapped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        tokens, x = jnp.zeros((1, TIME), int), jnp.zeros((1, TIME, WIDTH))
        self.embed = wrap(linen.Embed(VOCABULARY, WIDTH, **WIDE), rngs, tokens)
        make = lambda rngs: wrap(EncoderBlock(), rngs, x)
        self.blocks: Any = self.make_blocks(make, rngs)
        self.head = wrap(linen.Dense(VOCABULARY, **WIDE), rngs, x)

    def make_blocks(self, make, rngs) -> Any:
        return nnx.List([make(rngs) for _ in range(LAYERS)])

    def run(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD

    def __call__(self, tokens_BT):
        return self.head(self.run(self.embed(tokens_BT)))


class Stacked(Wrapped):
    def make_blocks(self, make, rngs):
        return jshard.Stack(make, LAYERS, rngs=rngs)

    def run(self, x_BTD):
        return self.blocks(x_BTD)


def linen_variables(params: nnx.State) -> Any:
    """The parameters of Wrapped or Stacked in Transformer's tree."""
    # Of NumPy: JAX compiles a program for each index.
    values = jax.device_get(nnx.to_pure_dict(params))
    blocks = values.pop("blocks")
    if 0 in blocks:
        layers = [blocks[i] for i in range(LAYERS)]
    else:
        layers = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(LAYERS)]
    return {"params": values | {f"blocks_{i}": x for i, x in enumerate(layers)}}


def cross_entropy(logits, tokens):
    targets = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def loss_fn(model, tokens):
    losses = cross_entropy(model(tokens), tokens)
    return jshard.Mean(losses.sum(), losses.size)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(Wrapped, (2, 2), marks=pytest.mark.slow),
        (Stacked, (1, 8)),
    ],
)
def test_a_linen_transformer_trains_as_on_one_device_with_linen_alone(model, mesh):
    fsdp = jshard.FSDP(make_mesh(*mesh), POLICY, units=(nnx.bridge.ToNNX,))
    state = fsdp.from_model(filled(lambda: model(nnx.Rngs(0))), TX)
    step = fsdp.train_step(loss_fn, TX)
    plain = linen_variables(fsdp.fetch(state.params))
    update, opt_state = make_update(TX), jax.jit(TX.init)(plain)

    @jax.jit
    @jax.value_and_grad
    def loss(variables, tokens):
        return cross_entropy(Transformer().apply(variables, tokens), tokens).mean()

    for i in range(3):
        rng = np.random.default_rng(i)
        tokens = rng.integers(0, VOCABULARY, (EXAMPLES, TIME))
        state, metrics = step(state, fsdp.shard_batch(tokens))
        value, grads = loss(plain, tokens)
        plain, opt_state = update(grads, opt_state, plain)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    got = linen_variables(fsdp.fetch(state.params))
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-9 * np.abs(w).max())


def test_each_linen_layer_is_a_unit_and_nothing_is_root():
    fsdp = jshard.FSDP(make_mesh(1, 8), POLICY, units=(nnx.bridge.ToNNX,))
    state = fsdp.abstract_state(Wrapped, TX)
    step = fsdp.train_step(loss_fn, TX)
    text = describe(fsdp, state, np.zeros((EXAMPLES, TIME), int), step)
    assert not any(line.startswith("root") for line in text.splitlines())
