"""models/gpt.py: an ordinary Flax model with a loss that never holds all logits."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.inference.generation import continue_prompts
from jshard.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(
    vocab_size=50, sequence_length=16, num_layers=2, num_heads=2, width=16, loss_chunk=8
)


def make_model(**changes: Any) -> GPT:
    return filled(lambda: GPT(GPTConfig(**vars(SMALL) | changes), rngs=nnx.Rngs(0)))


@jax.jit
def logits_of(model, tokens_BT):
    return model(tokens_BT)


def tokens(batch: int = 8, length: int = 16) -> jax.Array:
    rng = np.random.default_rng(0)
    return jax.device_put(rng.integers(0, 50, (batch, length), np.int32))


@pytest.mark.slow  # by default tests/nn/test_cross_entropy.py draws sizes of chunks
@pytest.mark.parametrize("chunk", [1, 7, 8, 1000])
def test_chunked_cross_entropy_equals_the_plain_one_with_gradients(x64, chunk):
    rng = np.random.default_rng(0)
    x_BTD = jax.device_put(rng.standard_normal((4, 6, 8)))
    head_DV = jax.device_put(rng.standard_normal((8, 50)))
    targets = jax.device_put(rng.integers(0, 50, (4, 6)))
    weights = jax.device_put((rng.random((4, 6)) < 0.7).astype(np.float64))

    def plain(x, head):
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ head, targets)
        return jnp.sum(loss * weights)

    def chunked(x, head):
        return jshard.nn.cross_entropy(x, head, targets, weights, chunk=chunk).total

    want = jax.jit(jax.value_and_grad(plain, (0, 1)))(x_BTD, head_DV)
    got = jax.jit(jax.value_and_grad(chunked, (0, 1)))(x_BTD, head_DV)
    chex.assert_trees_all_close(got, want, rtol=1e-12)
    mean = jax.jit(functools.partial(jshard.nn.cross_entropy, chunk=chunk))(
        x_BTD, head_DV, targets, weights
    )
    assert mean.count == weights.sum()


@pytest.mark.slow  # test_decoder_family.py has such a loss
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_that_of_the_logits(tied):
    model = make_model(tied=tied, label_smoothing=0.2, z_loss=0.01)
    inputs = tokens()
    logits_BTV = logits_of(model, inputs)
    chex.assert_shape(logits_BTV, (8, 16, 50))
    labels_BTV = optax.smooth_labels(jax.nn.one_hot(inputs, 50), 0.2)
    want = optax.softmax_cross_entropy(logits_BTV, labels_BTV)
    want += 0.01 * jax.nn.logsumexp(logits_BTV, axis=-1) ** 2
    mean = jax.jit(lambda model, *x: model.loss(*x))
    got = mean(model, inputs, inputs, jnp.ones(inputs.shape)).compute()
    np.testing.assert_allclose(got, jnp.mean(want), rtol=1e-6)
    assert hasattr(model, "head") != tied


def test_no_position_sees_a_later_token():
    model = make_model(tied=False)
    before = tokens()
    after = before.at[:, 9].set((before[:, 9] + 1) % 50)
    first, second = logits_of(model, before), logits_of(model, after)
    np.testing.assert_array_equal(first[:, :9], second[:, :9])
    assert not np.allclose(first[:, 9], second[:, 9])


def test_bf16_logits_and_loss_are_fp32():
    model, inputs = make_model(dtype=jnp.bfloat16), tokens()
    assert jax.eval_shape(model, inputs).dtype == jnp.float32
    mean = jax.eval_shape(model.loss, inputs, inputs, jnp.ones(inputs.shape))
    assert isinstance(mean, jshard.Mean)
    assert mean.total.dtype == jnp.float32


def test_heads_that_do_not_divide_the_width_are_a_users_error():
    with pytest.raises(jshard.UserError, match="width=16 is not divisible by"):
        GPTConfig(width=16, num_heads=3)


# By default test_generation.py has the recipe's sample on a mesh, against another way.
@pytest.mark.slow
def test_generation_keeps_the_prompt_and_does_not_depend_on_the_mesh():
    prompt = {"tokens": tokens(8, 4), "seed": np.arange(8, dtype=np.uint32)}

    def sample(devices: int) -> np.ndarray:
        fsdp = jshard.FSDP(
            jshard.make_mesh(devices=jax.devices()[:devices]),
            jshard.Policy(min_shard_elements=0),
        )
        state = fsdp.from_model(make_model(), optax.sgd(1.0))
        step = fsdp.predict_step(
            lambda model, batch: continue_prompts(model, batch, length=6)
        )
        return np.asarray(step(state, fsdp.shard_batch(prompt)))

    one, eight = sample(1), sample(8)
    chex.assert_shape(eight, (8, 10))
    np.testing.assert_array_equal(one, eight)
    np.testing.assert_array_equal(eight[:, :4], prompt["tokens"])
    assert len({row.tobytes() for row in eight[:, 4:]}) > 1  # seeds differ
