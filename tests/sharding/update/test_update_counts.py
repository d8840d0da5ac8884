"""How many updates were made is read from the optimizer, and averages count those."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from filled import filled
from jshard.sharding.update import counts
from jshard.storage.hub.parameters import find_parameters
from jshard.system.errors import UserError

DECAY = 0.99  # until hundreds of updates the number of updates sets the averages' pace
RATE = optax.linear_schedule(0.1, 0.0, 50)
finite, steps = optax.apply_if_finite, optax.MultiSteps
SKIPPING = functools.partial(steps, should_skip_update_fn=optax.skip_not_finite)
BRANCHES = {"w": optax.adam(0.1), "v": steps(optax.adam(0.1), 4)}


# By optimizer: what it counts after six steps of which the third has nan gradients,
# what its schedules read, and which steps make an update.
@pytest.mark.parametrize(
    ("tx", "made", "of_schedules", "which"),
    [
        (optax.sgd(0.1), None, None, "111111"),
        (optax.sgd(RATE), 6, 6, "111111"),
        (optax.adam(0.1), 6, 6, "111111"),
        (finite(optax.sgd(0.1), 5), None, None, "110111"),
        (finite(optax.adam(RATE), 5), 5, 5, "110111"),
        (optax.chain(optax.clip(1.0), finite(optax.adam(RATE), 5)), 5, 5, "110111"),
        (
            optax.chain(finite(optax.adam(1.0), 5), optax.scale_by_schedule(RATE)),
            5, 6, "110111",
        ),
        (SKIPPING(optax.sgd(RATE), 2), 2, 2, "010010"),
        (finite(steps(optax.sgd(RATE), 2), 5), 2, 2, "010010"),
        (
            optax.chain(steps(optax.adam(1.0), 2), optax.scale_by_schedule(RATE)),
            3, 6, "010101",
        ),
        (optax.partition(BRANCHES, {"w": "w", "v": "v"}), 6, 6, "111111"),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=RATE), 6, 6, "111111"),
        (
            optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
            None, None, "111111",
        ),
    ],
)  # fmt: skip
def test_counts_are_those_of_updates_and_of_schedules(tx, made, of_schedules, which):
    params = {"w": np.ones(3, np.float32), "v": np.ones((), np.float32)}
    state, found = jax.tree.map(jnp.asarray, tx.init(params)), ""
    tx = optax.with_extra_args_support(tx)
    update = jax.jit(lambda *given: tx.update(*given, value=jnp.float32(0.0)))
    for step in range(6):
        value = np.nan if step == 2 else 1.0
        grads = {name: np.full_like(x, value) for name, x in params.items()}
        _, new = update(grads, state, params)
        moved = counts.made(state, new)
        found += str(int(True if moved is None else moved))
        state = new
    as_number = lambda x: None if x is None else int(x)
    assert as_number(counts.updates(state)) == made
    assert as_number(counts.of_schedules(state)) == of_schedules
    if not counts.differ_from_steps(state):
        assert found == "111111"
    assert found == which


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum((model(x) - 1) ** 2), x.shape[0])


@pytest.mark.quick("MultiSteps")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("tx", "which", "policy"),
    [
        (SKIPPING(optax.adam(0.1), 2), [2, 5], {}),
        (finite(optax.sgd(0.1), 5), [1, 2, 4, 5, 6], {}),
        (optax.sgd(RATE), [1, 2, 4, 5, 6], {"loss_scale": True}),
    ],
    ids=["MultiSteps", "no-count", "loss-scale"],
)
def test_averages_are_those_of_the_parameters_of_every_update(tx, which, policy):
    policy = jshard.Policy(ema_decay=DECAY, min_shard_elements=1, **policy)
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:2]), policy)
    linear = functools.partial(nnx.Linear, 2, 2, dtype=float, param_dtype=float)
    make = lambda: nnx.Sequential(jshard.Unit(linear(rngs=nnx.Rngs(0))))
    state = fsdp.from_model(filled(make), tx)
    step = fsdp.train_step(loss_fn, tx)
    want = parity.by_path(fsdp.fetch(state.params))
    updates = 0
    for number in range(1, 7):
        x = np.random.default_rng(number).normal(size=(4, 2))
        x[3] += np.nan if number == 3 else 0
        state, metrics = step(state, fsdp.shard_batch(x))
        assert metrics["skipped"] == (number == 3)
        assert metrics.get("optimizer_updates", updates) == updates
        if number in which:
            updates += 1
            d = min(DECAY, (1 + updates) / (10 + updates))
            now = parity.by_path(fsdp.fetch(state.params))
            want = {path: d * want[path] + (1 - d) * now[path] for path in want}
    assert parity.worst(parity.by_path(fsdp.fetch(state.ema)), want) <= 1e-12


class Normed(nnx.Module):
    """A model with batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


def test_a_rejected_step_leaves_batch_statistics_and_one_used_all_the_same_is_told():
    fsdp, tx = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:2])), optax.sgd(0.1)
    tx = finite(tx, 1)
    state = fsdp.from_model(filled(lambda: Normed(nnx.Rngs(0))), tx)
    step = fsdp.train_step(loss_fn, tx)
    x = fsdp.shard_batch(np.full((4, 2), np.nan, np.float32))
    state, metrics = step(state, x)
    assert metrics["skipped"]
    assert np.isnan(metrics["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.model_state))
    _, metrics = step(state, x)  # the second in a row is used
    assert not metrics["skipped"]


def test_averages_do_not_go_on_by_an_optimizer_that_does_not_count(tmp_path):
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(ema_decay=0.9))
    make = lambda rngs: nnx.Sequential(jshard.Unit(nnx.Linear(8, 8, rngs=rngs)))
    state = fsdp.abstract_state(make, optax.sgd(0.1, 0.9))
    with pytest.raises(UserError, match=r"restore_optimizer: averages .* keeps none"):
        find_parameters(tmp_path, state, optimizer=True)
