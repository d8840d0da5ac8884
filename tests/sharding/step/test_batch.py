"""Batches of arrays, typed random keys and scalars: a step is that of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.plan.start_up import describe
from jshard.sharding.layout.microbatches import split
from parity import make_update

pytestmark = pytest.mark.usefixtures("x64")

EXAMPLES, WIDTH, STEPS = 16, 8, 3
TX = optax.adam(1e-2)


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.inner = linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.inner(x))


@functools.cache
def batches() -> list[dict[str, Any]]:
    """Inputs, a key an example, a key and a number for all examples."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(EXAMPLES, WIDTH)),
            "keys": jax.random.split(jax.random.key(step), EXAMPLES),
            "key": jax.random.key(100 + step),
            "size": 0.1 * (step + 1),
            "weight": np.float64(step + 2),
        }
        for step in range(STEPS)
    ]


def totals(model: Any, batch: dict[str, Any]) -> jax.Array:
    """The squared outputs of noisy inputs, summed."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(batch["keys"])
    shift = jax.random.normal(batch["key"], (WIDTH,))
    return jnp.sum(model(batch["x"] + batch["size"] * noise + shift) ** 2)


def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> Any:
    # The weight is the same on each device, so it may be one of the loss's terms.
    return batch["weight"] * jshard.Mean(totals(model, batch), len(batch["x"]))


@functools.cache
def model() -> Plain:
    return filled(lambda: Plain(nnx.Rngs(0)))


@functools.cache
def reference() -> tuple[list[float], Any]:
    """Losses and parameters of one device, with JAX and optax alone."""
    graphdef, params = nnx.split(model())
    update, opt_state, losses = make_update(TX), jax.jit(TX.init)(params), []

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any, batch: dict[str, Any]) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return batch["weight"] * totals(model, batch) / EXAMPLES

    for batch in batches():
        value, grads = loss(params, batch)
        params, opt_state = update(grads, opt_state, params)
        losses.append(float(value))
    return losses, params


def largest_error(got: Any, want: Any) -> float:
    differences = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), got, want
    )
    return max(jax.tree.leaves(differences))


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "deferred": {"accumulate": 2, "defer_scatter": True},
}
CASES = [
    pytest.param(
        jshard.Policy(min_shard_elements=1, **POLICIES[name]),
        where == "sharded",
        id=f"{where}-{name}",
        marks=pytest.mark.core if (where, name) == ("as-given", "accumulate") else (),
    )
    for where in ("sharded", "as-given")
    for name in POLICIES
]


@pytest.mark.quick("sharded-deferred", "as-given-accumulate")
@pytest.mark.parametrize(("policy", "sharded"), CASES)
def test_keys_and_scalars_in_batches_train_as_on_one_device(policy, sharded):
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy, units=(nnx.Linear,))
    state = fsdp.from_model(model(), TX)
    step, evaluate = fsdp.train_step(loss_fn, TX), fsdp.eval_step(loss_fn)
    want, params = reference()
    for batch, loss in zip(batches(), want, strict=True):
        given = fsdp.shard_batch(batch) if sharded else batch
        if not policy.defer_scatter:  # which evaluations know nothing of
            assert abs(evaluate(state, given).compute()["loss"] - loss) < 1e-9
        state, metrics = step(state, given)
        assert abs(metrics["loss"] - loss) < 1e-9
    assert largest_error(fsdp.fetch(state.params), params) < 1e-9


def test_keys_and_scalars_predict_as_on_one_device():
    def outputs(model, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(batch["keys"])
        return model(batch["x"] + batch["size"] * noise)

    fsdp = jshard.FSDP(jshard.make_mesh(), units=(nnx.Linear,))
    (batch, *_) = batches()
    want = jax.jit(lambda batch: outputs(model(), batch))(batch)
    state = fsdp.from_model(model(), optax.identity())
    got = fsdp.predict_step(outputs)(state, fsdp.shard_examples(batch))
    assert largest_error(got, want) < 1e-9


def test_keys_and_scalars_stay_what_they_are_on_the_mesh():
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2))
    (batch, *_) = batches()
    for placed in (fsdp.shard_batch(batch), fsdp.shard_examples(batch)):
        assert placed["keys"].dtype == batch["keys"].dtype
        assert jnp.array_equal(placed["keys"], batch["keys"])
        assert placed["keys"].sharding.shard_shape((EXAMPLES,)) == (2,)
        assert placed["key"] == batch["key"]
        assert placed["size"].sharding.is_fully_replicated
        assert placed["size"] == batch["size"]


def test_a_step_on_keys_and_scalars_is_described_from_one_processs_part():
    fsdp = jshard.FSDP(jshard.make_mesh(), units=(nnx.Linear,))
    state = fsdp.abstract_state(Plain, optax.sgd(0.1))
    step = fsdp.train_step(loss_fn, optax.sgd(0.1))
    assert "8 x cpu" in describe(fsdp, state, batches()[0], step)


def test_a_batch_of_scalars_alone_is_refused_in_one_line():
    fsdp = jshard.FSDP(jshard.make_mesh())
    for batch in ({"x": 1.0, "key": jax.random.key(0)}, {}):
        with pytest.raises(jshard.UserError, match="got no arrays") as error:
            fsdp.shard_batch(batch)
        assert "\n" not in str(error.value)


def test_micro_batches_have_arrays_without_columns_and_scalars_whole():
    (found, index) = split({"none": np.zeros((8, 0)), "x": np.arange(8), "b": 0.5}, 2)
    assert found["none"].shape == (2, 4, 0)
    np.testing.assert_array_equal(found["x"], [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(found["b"], [0.5, 0.5])
    assert index.tolist() == [0, 1]
