"""A metric that is a maximum is that of all examples, however they are divided."""

import functools
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import pipelines
from filled import filled
from jshard import Mean
from jshard.data.batches import eval_batches
from jshard.nn import Max

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32) - 5


def loss_fn(model: Any, x: Any) -> Any:
    y = model(x)
    return Mean(jnp.sum(y**2), y.size), {
        "largest": Max(jnp.max(y)),
        "least": Max(-jnp.min(y)),
        "signs": Max(jnp.max(jnp.sign(x).astype(jnp.int32))),
    }


def check(found: Any, y: np.ndarray) -> None:
    np.testing.assert_allclose(found["largest"], y.max(), rtol=1e-5)
    np.testing.assert_allclose(found["least"], -y.min(), rtol=1e-5)
    assert found["signs"] == -1


@functools.cache
def whole() -> np.ndarray:
    model = filled(lambda: pipelines.Layers(nnx.Rngs(0)))
    return np.asarray(model(X))


@pytest.mark.quick("micro-batches")
@pytest.mark.parametrize(
    ("axes", "accumulate"),
    [({"fsdp": 2, "replica": 2}, 1), ({"fsdp": 2}, 4), ({"pipe": 2, "fsdp": 2}, 4)],
    ids=["devices", "micro-batches", "stages"],
)
def test_a_step_has_the_maximum_of_its_batch(axes, accumulate):
    fsdp = jshard.FSDP(pipelines.mesh_of(**axes), pipelines.policy_of(accumulate))
    tx = optax.sgd(0.0)
    state = fsdp.from_model(filled(lambda: pipelines.Layers(nnx.Rngs(0))), tx)
    _, metrics = fsdp.train_step(loss_fn, tx)(state, fsdp.shard_batch(X))
    check(metrics, whole())


def test_an_evaluation_has_the_maximum_of_all_examples():
    """Whatever the copies that fill up its last batch are."""
    fsdp = jshard.FSDP(pipelines.mesh_of(fsdp=2), pipelines.policy_of(1))
    state = fsdp.from_model(filled(lambda: pipelines.Layers(nnx.Rngs(0))), optax.sgd(0))
    data = grain.MapDataset.range(13).map(lambda i: X[i])
    means = [
        fsdp.eval_step(loss_fn, examples=examples)(state, fsdp.shard_batch(rows))
        for rows, examples in eval_batches(data, batch_size=4, devices=2, num_threads=0)
    ]
    assert len(means) == 4
    total: Any = sum(means)
    check(total.compute(), whole()[:13])


def test_a_mean_of_a_maximum_is_refused_where_batches_are_averaged():
    """But not where a maximum scales numbers that add up."""

    def of(extra: Any) -> Any:
        def loss_fn(model: Any, x: Any) -> Any:
            most = jax.lax.pmax(jnp.max(x), ("replica", "fsdp"))
            least = jax.lax.pmin(jnp.max(x), ("replica", "fsdp"))
            metric = Mean(extra(x, most, least), 1)
            return Mean(jnp.sum(model(x)), x.size), {"own": metric}

        return loss_fn

    tx = optax.sgd(0.0)
    fsdp = jshard.FSDP(pipelines.mesh_of(fsdp=2), pipelines.policy_of(2))
    state = fsdp.abstract_state(pipelines.Layers, tx)
    jax.eval_shape(fsdp.eval_step(of(lambda x, a, b: jnp.sum(x / a + b))), state, X)
    for step in (
        fsdp.train_step(of(lambda x, most, least: most), tx),
        fsdp.eval_step(of(lambda x, most, least: most.astype(jnp.int32))),
        fsdp.eval_step(of(lambda x, most, least: -least)),
    ):
        with pytest.raises(jshard.UserError, match=r"'own' .* jshard\.nn\.Max\("):
            jax.eval_shape(step, state, X)


def test_a_maximum_is_a_scalar_and_no_loss():
    fsdp = jshard.FSDP(pipelines.mesh_of(fsdp=2))
    state = fsdp.abstract_state(pipelines.Layers, optax.sgd(0.0))
    for fn, said in (
        (lambda m, x: (Mean(1.0, 1), {"a": Max(m(x))}), r"needs a scalar, got shape"),
        (lambda m, x: Max(jnp.max(m(x))), "a value of type Max; it must return"),
    ):
        with pytest.raises(jshard.UserError, match=said):
            jax.eval_shape(fsdp.eval_step(fn), state, X)
