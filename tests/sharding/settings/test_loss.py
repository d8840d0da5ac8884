"""Mean: totals and counts that are divided only when both are global."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard import Mean


class Scale(nnx.Module):
    """One parameter: the gradient of a loss is read off an SGD step of it."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight[...]


TX = optax.sgd(1.0)


@functools.cache
def started() -> jshard.TrainState:
    """The first state, which no step may take: its parameter is everywhere whole."""
    return jshard.FSDP(jshard.make_mesh()).init(Scale, TX)


def step(loss_fn: Any, batch: Any, *, replica: int = 1, **policy: Any) -> Any:
    """(metrics, gradient of the one parameter) of a training step."""
    fsdp = jshard.FSDP(jshard.make_mesh(replica=replica), jshard.Policy(**policy))
    state = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), started())
    new, metrics = fsdp.train_step(loss_fn, TX)(state, fsdp.shard_batch(batch))
    weight: Any = new.params["weight"]
    gradient = 1 - weight.get_value()
    return jax.tree.map(float, metrics), float(gradient)


# Algebra.


def test_a_step_of_a_difference_is_that_of_one_device():
    def loss_fn(model, x):
        y, odd = model(x), x % 2
        return Mean(y.sum(), len(x)) / 2 - Mean((odd * y).sum(), odd.sum())

    x = np.arange(16.0) ** 2 % 7
    metrics, gradient = step(loss_fn, x, replica=2)
    odd = x % 2
    want = x.mean() / 2 - (odd * x).sum() / odd.sum()
    np.testing.assert_allclose((metrics["loss"], gradient), want, rtol=1e-5)


# In a step.


@pytest.mark.quick("2", "8-1", "1-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("replica", [1, pytest.param(2, marks=pytest.mark.core), 8])
def test_a_device_with_fewer_tokens_weighs_less(replica, accumulate):
    weights = np.zeros(16, np.float32)
    weights[:3] = 1  # of eight devices only two see any token
    batch = {"x": np.arange(16, dtype=np.float32), "weights": weights}

    def loss_fn(model, batch):
        w = batch["weights"]
        return Mean(jnp.sum(model(batch["x"]) * w), jnp.sum(w))

    metrics, gradient = step(loss_fn, batch, replica=replica, accumulate=accumulate)
    assert metrics["loss"] == pytest.approx(1)  # (0 + 1 + 2) / 3
    assert gradient == pytest.approx(1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_term_is_divided_by_its_own_global_count(accumulate):
    x = np.arange(16, dtype=np.float32)

    def loss_fn(model, x):
        y, few = model(x), x < 2
        rare = Mean(jnp.sum(y * few), jnp.sum(few))
        return Mean(jnp.sum(y), y.size) + 10 * rare, {"rare": rare}

    metrics, gradient = step(loss_fn, x, accumulate=accumulate)
    assert metrics["loss"] == pytest.approx(7.5 + 10 * 0.5)
    assert gradient == pytest.approx(7.5 + 10 * 0.5)
    assert metrics["rare"] == pytest.approx(0.5)
    assert metrics["grad_norm"] == pytest.approx(12.5)


@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_counts_below_one_divide_too(accumulate):
    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)) * 0.01, x.size * 0.01)

    x = np.arange(16, dtype=np.float32)
    metrics, gradient = step(loss_fn, x, accumulate=accumulate)
    assert metrics["loss"] == pytest.approx(7.5)
    assert gradient == pytest.approx(7.5)


def test_a_batch_without_tokens_has_no_gradient_and_a_loss_that_is_not_zero():
    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)) * 0, 0.0) + Mean(jnp.sum(model(x)), 0)

    metrics, gradient = step(loss_fn, np.ones(16, np.float32))
    assert metrics == {"loss": pytest.approx(np.nan, nan_ok=True), "grad_norm": 0}
    assert gradient == 0


@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_of_a_learned_weight_counts(accumulate):
    def loss_fn(model, x):
        weight = jnp.exp(-model.weight[...])
        return 2 * (weight * Mean(jnp.sum(x), x.size)), {"x": Mean(jnp.sum(x), x.size)}

    x = np.arange(16, dtype=np.float32)
    metrics, gradient = step(loss_fn, x, accumulate=accumulate)
    assert metrics["loss"] == pytest.approx(2 * np.exp(-1) * 7.5)
    assert gradient == pytest.approx(-2 * np.exp(-1) * 7.5)


TOKENS = 70_000  # more than float16's largest value, 65504


@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_float16_backward_does_not_overflow_at_70_000_tokens(accumulate):
    x = np.ones((16, TOKENS // 16), np.float16)
    dtypes = jshard.Precision(compute="float16", reduce="float16")

    def loss_fn(model, x):
        y = model(x)
        assert y.dtype == jnp.float16
        return Mean(jnp.sum(y.astype(jnp.float32)), y.size)

    metrics, gradient = step(loss_fn, x, precision=dtypes, accumulate=accumulate)
    assert metrics["loss"] == pytest.approx(1)
    assert gradient == pytest.approx(1, rel=0.02)
    # The sum's own gradient would have been out of range.
    unnormalised = jax.grad(lambda w: jnp.sum((x * w).astype(jnp.float32)))
    assert not jnp.isfinite(unnormalised(jnp.float16(1)))


def test_float16_totals_are_summed_over_devices_in_float32():
    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)).astype(jnp.float16), jnp.float16(1e4))

    metrics, _ = step(loss_fn, np.full(16, 1e4, np.float32))  # 20,000 a device
    assert metrics["loss"] == pytest.approx(2)


def test_eval_step_gives_global_means_that_add():
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2))
    state = fsdp.from_model(Scale(nnx.Rngs(0)), optax.identity())

    def loss_fn(model, batch):
        w = batch["w"]
        loss = Mean(jnp.sum(model(batch["x"]) * w), jnp.sum(w))
        return loss, {"first": Mean(jnp.sum(batch["x"] == 0), w.size)}

    step = fsdp.eval_step(loss_fn)

    def evaluate(x, w):
        return step(state, fsdp.shard_batch({"x": x, "w": w}))

    x = np.arange(8, dtype=np.float32)
    a, b = evaluate(x, (x > 5) * 1.0), evaluate(x, (x >= 0) * 1.0)
    assert a.compute() == pytest.approx({"loss": 6.5, "first": 1 / 8})
    assert (a + b).compute() == pytest.approx({"loss": (13 + 28) / 10, "first": 2 / 16})


# Errors.

AN_ARRAY = (
    r"an array of shape \(\); for jnp.mean\(x\) write "
    r"jshard.Mean\(jnp.sum\(x\), x.size\)"
)


@pytest.mark.quick("1", "2-<lambda>-returned None", "2-<lambda>-metric name 'loss'")
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda m: m.total / m.count, rf"returned {AN_ARRAY}"),
        (lambda m: m.total[None], r"returned an array of shape \(1,\); for jnp.mean"),
        (lambda m: m + m.total, rf"adds to a Mean {AN_ARRAY}"),
        (lambda m: m - 1.0, r"adds to a Mean a value of type float; for"),
        (lambda m: None, r"returned None; it must return jshard.Mean"),
        (
            lambda m: {"loss": m},
            r"returned a value of type dict; it must return jshard.Mean",
        ),
        (
            lambda m: (m, m),
            r"returned \(loss, aux\), and aux is a value of type Mean; return .* dict",
        ),
        # As nnx.value_and_grad(has_aux=True) takes.
        (
            lambda m: (m.total / m.count, jnp.ones((2, 3))),
            r"aux is an array of shape \(2, 3\); return \(jshard.Mean\(.*predict_step",
        ),
        (
            lambda m: (m, {"z": jnp.ones((2, 3))}),
            r"metric 'z' is an array of shape \(2, 3\); for jnp.mean.*predict_step",
        ),
        (lambda m: (m.total, {"z": m}), rf"returned {AN_ARRAY}"),
        (
            lambda m: (m, {"z": 2 * m}),
            r"metric 'z' is a value of type Loss; it must be",
        ),
        (lambda m: (m, {"z": m.total}), rf"metric 'z' is {AN_ARRAY}"),
        (
            lambda m: (m, {"z": 0.5}),
            r"metric 'z' is a value of type float; for jnp.mean\(x\) write",
        ),
        (
            lambda m: (m, {"z": "a"}),
            r"metric 'z' is a value of type str; it must be a .*Mean",
        ),
        (lambda m: (m, {"loss": m}), r"metric name 'loss' is taken"),
        (lambda m: (m, {"grad_norm": m}), r"metric name 'grad_norm' is taken"),
        (lambda m: (m, {"loss_scale": m}), r"metric name 'loss_scale' is taken"),
        (lambda m: (m, {"skipped_steps": m}), r"metric name 'skipped_steps' is taken"),
        (lambda m: Mean(m.total[None], m.count), r"total of shape \(1,\)"),
        (lambda m: Mean(m.total, jnp.ones(3)), r"count of shape \(3,\)"),
        (
            lambda m: (m, {"z": Mean(m.total[None], m.count)}),
            r"total of shape \(1,\)",
        ),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_no_mean_is_refused_in_one_line(result, message, accumulate):
    def loss_fn(model, x):
        return result(Mean(jnp.sum(model(x)), x.size))

    with pytest.raises(jshard.UserError, match=message) as error:
        step(loss_fn, np.ones(16, np.float32), accumulate=accumulate)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("loss_fn")


@pytest.mark.parametrize(("dtype", "gradient"), [(None, 1.0), ("float32", 1 + 2**-6)])
def test_gradients_of_micro_batches_add_up_in_the_dtype_of_sums(dtype, gradient):
    """In bfloat16 a sum of 1 and of many 2**-9, one after another, stays at 1."""
    x = np.zeros((9, 8), np.float32)
    x[:, 0] = [1] + [2.0**-9] * 8
    fsdp = jshard.FSDP(
        jshard.make_mesh(),
        jshard.Policy(
            accumulate=9, precision=jshard.Precision(param="bfloat16", sum=dtype)
        ),
    )

    def loss_fn(model, x):
        return Mean(jnp.sum(model(x)), 1 / 72)

    # Device 0 has the first nine examples, one in each micro-batch.
    batch = fsdp.shard_batch(x.T.reshape(-1))
    keep = optax.trace(0.0)
    state = fsdp.init(Scale, keep)
    new, _ = fsdp.train_step(loss_fn, keep)(state, batch)
    (found,) = jax.tree.leaves(new.opt_state.trace)
    assert float(found) == gradient
