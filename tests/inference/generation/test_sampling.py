"""Sampling against plain NumPy."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jshard import UserError
from jshard.inference.generation.decoding import NOTHING, Rows, decode_steps
from jshard.inference.generation.sampling import Sampling, filtered, sample


def reference(logits, temperature, top_k, top_p):
    """The definition, on sorted probabilities."""
    logits = logits / temperature
    order = np.argsort(-logits)
    kept = order[: top_k or None]
    probability = np.exp(logits[kept] - logits[kept].max())
    probability /= probability.sum()
    count = 1
    # All of them add up to 1 but for rounding.
    while count < len(kept) and (top_p == 1 or probability[:count].sum() < top_p):
        count += 1
    result = np.full(len(logits), -np.inf)
    result[kept[:count]] = logits[kept[:count]]
    return result


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 4, 10, 12]),  # each compiles
    top_p=st.floats(0.01, 0.99) | st.just(1.0),
)
def test_the_tokens_that_remain_are_those_of_the_definition(
    seed, temperature, top_k, top_p
):
    with jax.enable_x64(True):
        logits = np.random.default_rng(seed).normal(size=10) * 2
        got = filtered(jax.device_put(logits), Sampling(temperature, top_k, top_p))
        want = reference(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_tokens_that_add_up_to_exactly_p_are_enough():
    logits = jnp.log(jnp.asarray([0.5, 0.25, 0.25]))
    for top_p, count in ((0.25, 1), (0.5, 1), (0.75, 3), (0.5001, 3)):
        left = filtered(logits, Sampling(top_p=top_p))
        assert jnp.sum(jnp.isfinite(left)) == count, top_p


@pytest.mark.quick("Sampling(temperature=1.3")
@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(top_k=3), Sampling(1.3, 4, 0.6)], ids=str
)
def test_samples_have_the_probabilities_of_what_remains(sampling):
    logits = jax.device_put(
        np.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
    )
    keys = jax.random.split(jax.random.key(0), 20_000)
    tokens = jax.jit(jax.vmap(lambda key: sample(key, logits, sampling)))(keys)
    frequency = np.bincount(tokens, minlength=8) / len(keys)
    probabilities = jax.jit(lambda x: jax.nn.softmax(filtered(x, sampling)))
    want = np.asarray(probabilities(logits))
    np.testing.assert_allclose(frequency, want, atol=0.015)
    assert not np.any(frequency[want == 0])


def test_temperature_zero_is_greedy():
    logits = jnp.array([0.0, 3.0, 2.0])
    keys = jax.random.split(jax.random.key(0), 10)
    tokens = jax.vmap(lambda key: sample(key, logits, Sampling(0)))(keys)
    assert tokens.dtype == jnp.int32
    assert set(tokens.tolist()) == {1}


def test_equal_logits_at_the_limit_of_top_k_stay():
    kept = filtered(jnp.array([1.0, 1.0, 0.0]), Sampling(top_k=1))
    np.testing.assert_array_equal(jnp.isfinite(kept), [True, True, False])


class Flat:
    """A model to which all tokens are equally likely."""

    def decode(self, tokens_BT, positions_BT, cache):
        return jnp.zeros((*tokens_BT.shape, 1000)), cache


def test_a_choice_follows_from_the_rows_seed_and_the_position_alone():
    def tokens(seeds, positions, ends, count=6):
        token_B = jnp.zeros(len(seeds), jnp.int32)
        start, end, seed = map(jnp.array, (positions, ends, seeds))
        rows = Rows(token_B, start, end, seed, {})
        rows, found_BT = decode_steps(Flat(), rows, count=count, sampling=Sampling())
        return rows.position_B.tolist(), found_BT.tolist()

    at, (one, other, later) = tokens([1, 2, 1], [0, 0, 2], [6, 6, 6])
    assert at == [6, 6, 6]
    assert len(set(one)) == len(set(other)) == 6  # of 1,000 tokens
    assert not set(one) & set(other)
    assert later == [*one[2:], NOTHING, NOTHING]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_values_without_a_meaning_are_a_users_error(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
