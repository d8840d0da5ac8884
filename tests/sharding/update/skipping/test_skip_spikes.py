"""A step that is a spike changes nothing, and all others are those of the optimizer."""

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
from jshard.sharding.update.skipping.skip_spikes import decide
from jshard.system.errors import UserError

K, WINDOW, DECAY = 3.0, 4, 0.9
RATE = optax.linear_schedule(0.1, 0.0, 50)
SPIKES = {3: np.nan, 8: 100.0, 9: 100.0, 12: 40.0}  # what a step's batch is times
EARLY = {2: 100.0}  # when fewer than WINDOW steps were accepted


class Reference:
    """Which steps are spikes, in NumPy."""

    def __init__(self):
        self.losses, self.norms = [], []

    def takes(self, loss: float, norm: float) -> bool:
        taken = bool(np.isfinite(loss) and np.isfinite(norm))
        if len(self.losses) >= WINDOW:
            for x, before in ((loss, self.losses), (norm, self.norms)):
                last = before[-WINDOW:]
                taken &= bool(x <= np.mean(last) + K * np.std(last))
        if taken:
            self.losses.append(loss)
            self.norms.append(norm)
        return taken


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("x64")
def test_alone_it_leaves_out_spikes_of_the_loss_and_of_the_norm_and_no_others():
    inner = optax.adam(RATE)
    tx = jshard.optim.skip_spikes(inner, k=K, window=WINDOW)
    params = {"w": jnp.array([0.5, -0.0, 0.0]), "v": jnp.float64(2.0)}
    state, reference = tx.init(params), Reference()
    want, of_inner = params, inner.init(params)
    update, plain = jax.jit(tx.update), jax.jit(inner.update)
    rng, taken = np.random.default_rng(0), []
    for step in range(1, 17):
        loss = 1 + 0.1 * rng.normal() + (9 if step in (1, 9, 10) else 0)
        size = (
            np.nan if step == 3 else 30.0 if step in (6, 12) else 1 + 0.1 * rng.normal()
        )
        grads = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), params)
        norm = float(optax.tree.norm(grads))
        updates, state = update(grads, state, params, value=jnp.float64(loss))
        params = optax.apply_updates(params, updates)
        if reference.takes(loss, norm):
            taken.append(step)
            updates, of_inner = plain(grads, of_inner, want)
            want = optax.apply_updates(want, updates)
        assert bits((params, state.inner)) == bits((want, of_inner))
    # From step 6 on, when there are WINDOW accepted steps, spikes are looked for.
    assert taken == [1, 2, 4, 5, 7, 8, 11, 13, 14, 15, 16]
    assert (int(state.accepted), int(state.skipped)) == (11, 5)
    last = {i % WINDOW: x for i, x in enumerate(reference.losses)}
    np.testing.assert_allclose(state.losses, [last[i] for i in range(WINDOW)])


def test_a_norm_that_is_given_is_taken():
    tx = jshard.optim.skip_spikes(optax.sgd(0.1), window=2)
    given = {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)})
    _, state = jax.jit(tx.update)(*given, value=1.0, grad_norm=2.0)
    assert np.asarray(state.grad_norms)[0] == 2


def test_what_a_loss_scale_skips_is_no_spike():
    state = jshard.optim.skip_spikes(optax.sgd(0.1)).init({"w": jnp.ones(3)})
    overflow = jnp.float32(1.0), jnp.float32(np.inf), jnp.bool_(False)
    takes, new, metrics = jax.jit(decide)(6.0, state, *overflow)
    assert not takes
    assert bits(new) == bits(state)
    assert metrics["skipped_steps"] == metrics["spikes_in_a_row"] == 0


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum((model(x) - 1) ** 2), x.shape[0])


def batch(step: int) -> np.ndarray:
    x = np.random.default_rng(step).normal(size=(16, 2))
    return x * (SPIKES | EARLY).get(step, 1.0)


class Model(nnx.Module):
    """A linear layer, and the mean of what it was given."""

    def __init__(self) -> None:
        linear = functools.partial(nnx.Linear, 2, 2, dtype=float, param_dtype=float)
        self.linear = jshard.Unit(linear(rngs=nnx.Rngs(0)))
        self.mean = nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean.set_value(jshard.pmean(jnp.mean(x, axis=0)))
        return self.linear(x)


def kept(state: jshard.TrainState) -> list[bytes]:
    """What a skipped step leaves as it is."""
    inner = state.opt_state.inner
    return bits((state.params, inner, state.ema, state.model_state))


@functools.cache
def plain_run() -> tuple:
    """Losses, steps that make an update, parameters, averages: of one plain model."""
    graphdef, params, rest = nnx.split(filled(Model), nnx.Param, ...)
    tx, reference = optax.adam(RATE), Reference()
    opt_state, averages, losses, taken = tx.init(params), params, [], []
    loss_of = lambda params, x: loss_fn(
        nnx.merge(graphdef, params, rest, copy=True), x
    ).compute()
    value_and_grad, update = jax.jit(jax.value_and_grad(loss_of)), jax.jit(tx.update)
    for step in range(1, 15):
        loss, grads = value_and_grad(params, batch(step))
        losses.append(float(loss))
        if reference.takes(float(loss), float(optax.tree.norm(grads))):
            taken.append(step)
            updates, opt_state = update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            d = min(DECAY, (1 + len(taken)) / (10 + len(taken)))
            move = lambda average, x, d=d: d * average + (1 - d) * x
            averages = jax.tree.map(move, averages, params)
    return losses, taken, params, averages


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("devices", "knobs"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (8, {"accumulate": 1}),
        pytest.param(8, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(8, {"offload": "all"}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device_and_numpy_and_a_spike_leaves_all(devices, knobs):
    policy = jshard.Policy(ema_decay=DECAY, min_shard_elements=1, **knobs)
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, policy)
    tx = jshard.optim.skip_spikes(optax.adam(RATE), k=K, window=WINDOW)
    state, step = fsdp.from_model(filled(Model), tx), fsdp.train_step(loss_fn, tx)
    losses, taken, *want = plain_run()
    assert taken == [1, 2, 4, 5, 6, 7, 10, 11, 13, 14]
    row, metrics = 0, {}
    for number, loss in enumerate(losses, 1):
        before = kept(state)
        state, metrics = step(state, fsdp.shard_batch(batch(number)))
        skipped = number not in taken
        row = row + 1 if skipped else 0
        assert metrics["skipped"] == skipped == (kept(state) == before)
        assert metrics["spikes_in_a_row"] == row
        made = sum(n < number for n in taken)
        assert metrics["optimizer_updates"] == made
        if np.isfinite(loss):
            assert parity.error(metrics["loss"], loss) <= 1e-9
            over = metrics["loss"] > metrics["loss_limit"]
            assert skipped == (
                over | (metrics["grad_norm"] > metrics["grad_norm_limit"])
            )
    assert metrics["skipped_steps"] == len(losses) - len(taken)
    got = fsdp.fetch((state.params, state.ema))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.slow
def test_it_costs_no_collective():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=1))
    make = lambda rngs: nnx.Sequential(jshard.Unit(nnx.Linear(16, 16, rngs=rngs)))
    counts = []
    for tx in (optax.adam(RATE), jshard.optim.skip_spikes(optax.adam(RATE))):
        state = fsdp.abstract_state(make, tx)
        x = jax.ShapeDtypeStruct((16, 16), np.float32)
        program = fsdp.train_step(loss_fn, tx).lower(state, x).compile().as_text()
        names = "all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all("
        counts.append([program.count(name) for name in names])
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        jshard.optim.per_layer,
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: jshard.optim.skip_spikes(tx),
    ],
    ids=["chain", "per_layer", "MultiSteps", "itself"],
)
def test_a_step_refuses_it_within_another_transformation(wrap):
    fsdp = jshard.FSDP(jshard.make_mesh())
    make = lambda rngs: nnx.Sequential(jshard.Unit(nnx.Linear(8, 8, rngs=rngs)))
    tx = wrap(jshard.optim.skip_spikes(optax.adam(0.1)))
    with pytest.raises(UserError, match="skip_spikes is within another transformation"):
        fsdp.abstract_state(make, tx)


@pytest.mark.parametrize("options", [{"k": 0}, {"k": np.inf}, {"window": 1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(UserError, match="skip_spikes: "):
        jshard.optim.skip_spikes(optax.sgd(0.1), **options)
