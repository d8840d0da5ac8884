"""Dynamic loss scaling: float16 trains, and overflows are skipped and counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.update.skipping import loss_scale
from jshard.system.errors import RunFailed
from jshard.training.non_finite import check_finite

POLICY = jshard.Policy(loss_scale=True, min_shard_elements=0)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = jshard.Unit(nnx.Linear(8, 16, rngs=rngs))
        self.down = jshard.Unit(nnx.Linear(16, 8, rngs=rngs))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss_fn(model, batch):
    error = model(batch["x"]).astype(jnp.float32) - batch["y"]
    return jshard.Mean(jnp.sum(error**2), error.size)


class Normalised(nnx.Module):
    """A model with state: batch statistics, and a count of masks."""

    def __init__(self, rngs):
        self.linear = jshard.Unit(Model(rngs))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def started(fsdp, model_type, optimizer):
    return fsdp.from_model(filled(lambda: model_type(nnx.Rngs(0))), optimizer)


@functools.cache
def trainer(model_type=Model, **knobs):
    """(fsdp, first state, step): compiled once."""
    policy = dataclasses.replace(POLICY, **knobs)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    optimizer = optax.adam(1e-2)
    state = started(fsdp, model_type, optimizer)
    return fsdp, state, fsdp.train_step(loss_fn, optimizer)


def copied(state):
    """A copy, for a step to take."""
    return jax.tree.map(lambda x: x.copy(), state)


def run(batches, *, state=None, **knobs):
    fsdp, start, step = trainer(**knobs)
    state = state or copied(start)
    history = []
    for batch in batches:
        state, metrics = step(state, fsdp.shard_batch(batch))
        history.append(jax.device_get(metrics))
    return state, history


def make_batches(count):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(count, 32, 8)).astype(np.float32)
    return [{"x": x, "y": np.roll(x, 1, axis=1)} for x in rows]


def params(state):
    return [np.asarray(x) for x in jax.tree.leaves(state.params)]


def scale_of(state: jshard.TrainState) -> loss_scale.LossScale:
    assert state.loss_scale is not None
    return state.loss_scale


# By default a test below does it at any scale, in float16.
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scale_changes_no_float32_gradient(accumulate):
    scaled, _ = run(make_batches(3), accumulate=accumulate)
    plain, _ = run(make_batches(3), accumulate=accumulate, loss_scale=False)
    for got, want in zip(params(scaled), params(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.slow  # a test below is stricter, with parameters in float16
def test_float16_follows_float32():
    half = jshard.Precision(compute="float16", reduce="float16")
    got, history = run(make_batches(20), precision=half)
    want, reference = run(make_batches(20), accumulate=1, loss_scale=False)
    assert history[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=0.01)
    assert history[-1]["skipped_steps"] == 0
    for a, b in zip(params(got), params(want), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)


STATEFUL = {
    "model_type": Normalised,
    "precision": jshard.Precision(compute="float16", reduce="float16"),
    "ema_decay": 0.9,
    "accumulate": 2,
    "loss_scale_start": 2.0**10,
    "loss_scale_window": 1,
}


def test_a_step_that_overflows_changes_only_the_scale_and_the_step():
    """The scale starts and grows as the policy says, and is halved."""
    batches = make_batches(3)
    batches[1]["y"] = batches[1]["y"] + np.float32(np.inf)
    before, _ = run(batches[:1], **STATEFUL)
    kept = params(before)
    after, history = run(batches[:2], **STATEFUL)
    for got, want in zip(params(after), kept, strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(after.step) == 2
    assert int(after.opt_state[0].count) == 1
    assert float(scale_of(after).scale) == 2.0**10
    assert history[1]["skipped_steps"] == 1
    _, history = run(batches, **STATEFUL)
    assert [h["skipped_steps"] for h in history] == [0, 1, 1]
    assert [h["loss_scale"] for h in history] == [2.0**10, 2.0**11, 2.0**10]


@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_overflows_changes_no_averages_and_no_model_state(accumulate):
    fsdp, start, step = trainer(**STATEFUL | {"accumulate": accumulate})
    state = copied(start)

    def values(state):
        kept = fsdp.fetch((state.params, state.ema, state.model_state))
        return [np.asarray(x) for x in jax.tree.leaves(kept)]

    good, bad = make_batches(2)
    bad["y"] = bad["y"] + np.float32(np.inf)
    seen = [values(state)]
    for batch, skipped in ((good, 0), (bad, 1), (good, 1)):
        state, metrics = step(state, fsdp.shard_batch(batch))
        assert metrics["skipped_steps"] == skipped
        seen.append(values(state))
    at_first, first, after_overflow, last = seen
    for unchanged, other in zip(after_overflow, first, strict=True):
        np.testing.assert_array_equal(unchanged, other)
    # All but the key of the masks moves in steps that are taken.
    for before, after in ((at_first, first), (after_overflow, last)):
        moved = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
        assert moved.count(False) == 1


# Parameters in float16.

HALF = jshard.Precision(param="float16", compute="float16", reduce="float16")
LOW = {
    "float16": dataclasses.replace(POLICY, precision=HALF),
    "in micro-batches": dataclasses.replace(POLICY, precision=HALF, accumulate=2),
    "scattered late": dataclasses.replace(POLICY, precision=HALF, defer_scatter=True),
    "offloaded": dataclasses.replace(
        POLICY, precision=HALF, offload="optimizer", ema_decay=0.9
    ),
    "bfloat16": dataclasses.replace(POLICY, precision=jshard.Precision("bfloat16")),
}


CLIPPED = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))


class Low:
    """Trains with a loss times a weight."""

    def __init__(self, policy):
        self.fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
        weighted = lambda m, b: jshard.pmean(b["weight"][0]) * loss_fn(m, b)
        self.step = self.fsdp.train_step(weighted, CLIPPED)
        self.start = started(self.fsdp, Model, CLIPPED)

    def run(self, weight, scale=None, steps=3):
        """Some steps from the start, with this loss scale at first."""
        state = copied(self.start)
        if scale is not None:
            # Where it was, so that a step is not compiled again.
            place = scale_of(state).scale.sharding
            scale = jax.device_put(np.float32(scale), place)
            start = dataclasses.replace(scale_of(state), scale=scale)
            state = dataclasses.replace(state, loss_scale=start)
        history = []
        for batch in make_batches(steps):
            batch["weight"] = np.full(32, weight, np.float32)
            state, metrics = self.step(state, self.fsdp.shard_batch(batch))
            history.append(jax.device_get(metrics))
        return state, history


POLICIES = LOW | {
    "wide": dataclasses.replace(POLICY, loss_scale=False),
    "not scaled": dataclasses.replace(LOW["float16"], loss_scale=False),
}


@functools.cache
def low(name):
    return Low(POLICIES[name])


@pytest.mark.quick("float16")
@pytest.mark.parametrize("name", LOW)
def test_low_precision_parameters_follow_float32_at_any_scale(name):
    # Gradients of about 1e-3, which float16 holds times 1 and times 2**24.
    wide, half = low("wide"), low(name)
    want, reference = wide.run(2e-3)
    for a, b in zip(params(wide.start), params(want), strict=True):
        assert np.abs(b - a).max() > 0.02
    for scale in (1, 2**15, 2**16, 2**17, 2**24):
        got, history = half.run(2e-3, scale)
        assert [h["skipped_steps"] for h in history] == [0, 0, 0]
        for ours, theirs in zip(history, reference, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
        for a, b in zip(params(got), params(want), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b, atol=0.01)


@pytest.mark.quick("float16")
@pytest.mark.parametrize("name", LOW)
def test_an_overflow_of_float16_parameters_is_skipped_and_none_is_a_zero(name):
    # Gradients of about 1: in float16 they are infinite until the scale has fallen.
    half = low(name)
    after, history = half.run(1.0, 2**24, steps=20)
    skipped = int(history[-1]["skipped_steps"])
    assert [h["skipped_steps"] for h in history] == [
        min(t, skipped) for t in range(1, 21)
    ]
    assert (0 < skipped < 19) == (name != "bfloat16")
    assert [bool(np.isfinite(h["grad_norm"])) for h in history] == [
        t >= skipped for t in range(20)
    ]
    assert all(h["grad_norm"] != 0 for h in history)
    assert int(optax.tree.get(after.opt_state, "count")) == 20 - skipped
    for a, b in zip(params(after), params(half.start), strict=True):
        assert np.isfinite(a.astype(np.float32)).all()
        assert (a != b).any()


@pytest.mark.quick("False")
@pytest.mark.parametrize("scaled", [True, False])
def test_a_gradient_norm_above_float16s_range_of_squares_is_not_infinite(scaled):
    want, reference = low("wide").run(2000.0)
    got, history = low("float16" if scaled else "not scaled").run(
        2000.0, 1 if scaled else None
    )
    for ours, theirs in zip(history, reference, strict=True):
        assert theirs["grad_norm"] > 256  # whose square is above 65504
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
    for a, b in zip(params(got), params(want), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.003)


def test_optimizer_state_of_float16_parameters_is_float32():
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), LOW["float16"])
    state = fsdp.abstract_state(Model, optax.adam(1e-2))
    dtypes = lambda tree: {str(x.dtype) for x in jax.tree.leaves(tree)}
    assert dtypes(state.params) == {"float16"}
    assert dtypes(state.opt_state[0].mu) == dtypes(state.opt_state[0].nu) == {"float32"}


def test_the_scale_grows_after_many_good_steps_and_stays_in_bounds():
    state = loss_scale.start(POLICY)
    state = dataclasses.replace(state, good_steps=jnp.int32(1999))
    grown = loss_scale.update(state, jnp.bool_(True), 2000)
    assert float(grown.scale) == 2.0**16
    assert int(grown.good_steps) == 0
    for finite, bound in ((True, loss_scale.LARGEST), (False, 1.0)):
        for _ in range(40):
            state = loss_scale.update(state, jnp.bool_(finite), 1)
        assert float(state.scale) == bound


def test_a_checkpoint_holds_the_scale_and_the_count_of_skipped_steps(tmp_path):
    batches = make_batches(3)
    batches[1]["y"] = batches[1]["y"] + np.float32(np.inf)
    whole, _ = run(batches, **STATEFUL)
    half, _ = run(batches[:2], **STATEFUL)
    fsdp, *_ = trainer(**STATEFUL)
    with jshard.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(half)
        checkpointer.wait()
        abstract = fsdp.abstract_state(Normalised, optax.adam(1e-2))
        restored = checkpointer.restore(abstract)
    assert float(scale_of(restored).scale) == 2.0**10
    assert int(scale_of(restored).skipped) == 1
    resumed, _ = run(batches[2:], state=restored, **STATEFUL)
    for got, want in zip(params(resumed), params(whole), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("scale", "grad_norm", "stops"),
    [(1.0, np.inf, True), (1.0, 0.5, False), (2.0, np.nan, False)],
)
def test_a_run_stops_when_a_scale_of_one_does_not_help(scale, grad_norm, stops):
    metrics = {"loss": np.inf, "loss_scale": scale, "grad_norm": grad_norm}
    if not stops:
        return check_finite(7, metrics)
    with pytest.raises(RunFailed, match="the loss scale fell to 1 at step 7"):
        check_finite(7, metrics)
