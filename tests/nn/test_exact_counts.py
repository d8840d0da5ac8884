"""Counts: whole numbers add up exactly, and those that are trained have gradients."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jshard
from jshard import Mean, Means
from jshard.sharding.settings.count import Count, as_float, exact


@given(st.lists(st.integers(-(2**58), 2**58), min_size=1, max_size=8))
def test_whole_numbers_of_any_sign_add_up_exactly(numbers):
    total = functools.reduce(operator.add, map(exact, numbers))
    assert int(total) == sum(numbers)
    assert float(as_float(total)) == pytest.approx(sum(numbers), rel=3e-7)


@pytest.mark.parametrize(
    "number",
    [
        True,
        np.int8(-3),
        np.uint8(255),
        np.uint16(2**16 - 1),
        np.int32(-(2**31)),
        np.int32(2**31 - 1),
        np.uint32(2**32 - 1),
    ],
    ids=lambda x: f"{type(x).__name__} {x}",
)
def test_arrays_of_every_integer_dtype_are_exact(number):
    assert int(exact(jnp.asarray(number))) == int(exact(number)) == int(number)


@pytest.mark.parametrize("number", [-(2**40) - 7, 2**53 + 1])
def test_so_are_those_of_64_bits(number):
    with jax.enable_x64(True):
        assert int(exact(jnp.asarray(number))) == number
        assert int(exact(jnp.asarray(2**63 + 5, jnp.uint64) >> 3)) == 2**60


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_other_numbers_are_floats_of_32_bits_or_more(name):
    found = exact(jnp.asarray(0.5, name))
    assert (found.dtype, float(found)) == (jnp.float32, 0.5)


def test_evaluated_batches_add_up_beyond_an_int32():
    many = 2**31 - 5
    count = exact(many)
    batch = Means(2.0 * Mean(1.0 * many, count), {"hits": Mean(count, count)})
    total: Any = sum([batch] * 5)
    assert total.compute() == {"loss": pytest.approx(2), "hits": 1}
    ((_, mean),) = total.loss.terms
    assert int(mean.count) == int(total.metrics["hits"].total) == 5 * many


# In a step.


class Scale(nnx.Module):
    """A weight for examples, and a share of them that each call doubles."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        self.weight = nnx.Param(jnp.asarray(0.5))
        self.calls = nnx.BatchStat(jnp.asarray(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] *= 2
        return jax.nn.sigmoid(x * self.weight[...])


X = np.linspace(-2, 3, 16, dtype=np.float32)
TX = optax.sgd(1.0)


@functools.cache
def started() -> jshard.TrainState:
    return jshard.FSDP(jshard.make_mesh()).init(Scale, TX)


def step(loss_fn: Any, devices: int = 8, **policy: Any) -> tuple[dict, float]:
    """(metrics, gradient of the weight) of a step."""
    fsdp = jshard.FSDP(
        jshard.make_mesh(devices=jax.devices()[:devices]), jshard.Policy(**policy)
    )
    state = started() if devices == 8 else fsdp.init(Scale, TX)
    state = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    new, metrics = fsdp.train_step(loss_fn, TX)(state, fsdp.shard_batch(X))
    weight: Any = new.params["weight"]
    return jax.tree.map(float, metrics), 0.5 - float(weight.get_value())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_of_2_to_the_32_tokens_has_its_mean(accumulate):
    here = 2**29 // accumulate

    def loss_fn(model, x):
        hits = Mean(jnp.int32(here), here)
        return Mean(jnp.sum(model.weight[...] * x) * here, here), {"hits": hits}

    metrics, gradient = step(loss_fn, accumulate=accumulate)
    want = np.sum(X) / 8 / accumulate
    assert metrics["loss"] == pytest.approx(want * 0.5)
    assert gradient == pytest.approx(want)
    assert metrics["hits"] == 1


def test_a_count_of_python_may_be_larger_than_an_int32():
    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)) * 2.0**30, 2**34)

    metrics, _ = step(loss_fn)
    want = np.sum(1 / (1 + np.exp(-0.5 * X))) / 8 / 2**4
    assert metrics["loss"] == pytest.approx(want)
    assert float(Mean(2.0**33, 2**34).compute()) == 0.5


def dice(model: Any, x: Any) -> Mean:
    found = model(x)
    return Mean(-2 * jnp.sum(found * (x > 0)), jnp.sum(found) + jnp.sum(x > 0))


@pytest.mark.quick("2-2")
@pytest.mark.parametrize(("devices", "accumulate"), [(8, 1), (2, 2)])
def test_a_count_that_depends_on_what_is_trained_has_its_gradient(devices, accumulate):
    metrics, gradient = step(dice, devices, accumulate=accumulate)

    def plain(weight):
        return dice(lambda x: jax.nn.sigmoid(x * weight), jnp.asarray(X)).compute()

    loss, want = jax.value_and_grad(plain)(0.5)
    assert metrics["loss"] == pytest.approx(float(loss))
    assert gradient == pytest.approx(float(want), rel=1e-5)


def test_counts_of_micro_batches_are_those_of_the_state_that_each_has():
    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)), x.size * model.calls[...])

    metrics, gradient = step(loss_fn, accumulate=2)
    found = 1 / (1 + np.exp(-0.5 * X))
    count = 8 * 2 + 8 * 4
    assert metrics["loss"] == pytest.approx(np.sum(found) / count)
    assert gradient == pytest.approx(np.sum(X * found * (1 - found)) / count, rel=1e-5)


def test_a_count_below_zero_is_an_error_or_where_it_is_computed_nan():
    with pytest.raises(jshard.UserError, match=r"the count -3; .* negative"):
        step(lambda model, x: Mean(jnp.sum(model(x)), -3))
    metrics, gradient = step(lambda model, x: Mean(jnp.sum(model(x)), -x.size + x[0]))
    assert np.isnan([metrics["loss"], gradient]).all()


def test_a_count_is_a_pytree_of_one_array():
    leaves, structure = jax.tree.flatten(exact(5))
    assert [x.shape for x in leaves] == [(4,)]
    assert isinstance(jax.tree.unflatten(structure, leaves), Count)
