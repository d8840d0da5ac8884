"""Averages of the parameters: their values, where they live, and what they cost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import hlo
import jshard
import parity
from filled import filled
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete
from jshard.sharding.update import ema

OPTIMIZER = optax.sgd(0.5, momentum=0.9)
DECAY = 0.3  # the first two steps of a run average with less


def policy(ema_decay: float | None = DECAY, **knobs: Any) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, ema_decay=ema_decay, **knobs)


class Layer(nnx.Module):
    """A matrix and a vector, whose initial values compile in no time."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        self.matrix = nnx.Param(jax.device_put(np.sin(np.arange(128.0)).reshape(8, 16)))
        self.vector = nnx.Param(jax.device_put(np.linspace(-1.0, 1.0, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ self.matrix[...])
        return x + h @ self.matrix[...].T * self.vector[...]


class Model(nnx.Module):
    """A Stack and a Unit."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, 2, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))


def loss_fn(model: Any, batch: dict[str, Any]) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(batch["x"]) ** 2), batch["x"].shape[0])


def make_fsdp(policy: jshard.Policy, *, replica: int = 1) -> jshard.FSDP:
    return jshard.FSDP(jshard.make_mesh(replica=replica), policy)


def batch(seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(32, 8))}


@functools.cache
def trained() -> tuple[jshard.FSDP, jshard.TrainState]:
    """A state with bfloat16 parameters after two steps; not to be donated."""
    half = jshard.Precision(param="bfloat16")
    fsdp = make_fsdp(policy(precision=half), replica=2)
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), OPTIMIZER)
    step = fsdp.train_step(loss_fn, OPTIMIZER)
    for _ in range(2):
        state, _ = step(state, fsdp.shard_batch(batch()))
    return fsdp, state


def averages(history: list[dict[tuple, Any]]) -> dict[tuple, Any]:
    """What the averages are after the parameters had these values."""
    mean, *updates = history
    for t, params in enumerate(updates, 1):
        d = min(DECAY, (1 + t) / (10 + t))
        mean = {path: d * mean[path] + (1 - d) * params[path] for path in mean}
    return mean


@pytest.mark.quick("2-4")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("replica", "accumulate"), [(1, 1), (2, 4)])
def test_averages_are_those_of_the_parameters_of_every_step(replica, accumulate):
    fsdp = make_fsdp(policy(accumulate=accumulate), replica=replica)
    tx = jshard.optim.per_layer(optax.adam(1e-2))
    trained = lambda path, x: isinstance(x, nnx.Param) and path != ("head", "matrix")
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), tx, wrt=trained)
    step = fsdp.train_step(loss_fn, tx)
    history = [parity.by_path(fsdp.fetch(state.params))]
    for seed in range(4):
        state, _ = step(state, fsdp.shard_batch(batch(seed)))
        history.append(parity.by_path(fsdp.fetch(state.params)))
    got = parity.by_path(fsdp.fetch(state.ema))
    assert len(got) == 3, "frozen parameters are averaged"
    assert parity.worst(got, averages(history)) <= 1e-14


def test_averages_start_as_the_parameters_and_share_no_buffers_with_them():
    state = make_fsdp(policy()).init(Model, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)

    def buffers(tree: Any) -> set[int]:
        shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
        return {shard.data.unsafe_buffer_pointer() for shard in shards}

    # A step donates both, and one buffer cannot be donated twice.
    assert not buffers(state.ema) & buffers(state.params)
    assert not buffers(state.ema) & buffers(state.with_ema_params().params)


@pytest.mark.slow  # test_padding.py has padded averages
def test_averages_are_sharded_like_the_parameters():
    fsdp, state = trained()
    abstract = fsdp.abstract_state(Model, OPTIMIZER)
    trees = abstract.ema, state.ema, state.params
    for born, average, param in zip(*map(jax.tree.leaves, trees), strict=True):
        assert born.sharding == average.sharding == param.sharding
        shapes = [shard.data.shape for shard in average.addressable_shards]
        assert shapes == [shard.data.shape for shard in param.addressable_shards]
        assert np.prod(shapes[0]) == param.size / 4


def test_averages_of_bfloat16_parameters_are_float32():
    _, state = trained()
    dtypes = lambda tree: {str(x.dtype) for x in jax.tree.leaves(tree)}
    assert dtypes(state.params) == {"bfloat16"}
    assert dtypes(state.ema) == {"float32"}
    assert dtypes(state.with_ema_params().params) == {"bfloat16"}


def test_parameters_that_are_no_floats_are_copied():
    params = [nnx.State({"index": nnx.Param(jnp.array(i))}) for i in range(2)]
    averages = ema.start(params[0])
    averages = ema.update(averages, params[1], DECAY, jnp.ones((), jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, averages, params[1])


def test_averages_are_evaluated_as_weights_by_the_program_of_the_parameters():
    fsdp, state = trained()
    traces = []

    def counting_loss(model: nnx.Module, batch: dict[str, Any]) -> jshard.Mean:
        traces.append(1)
        return loss_fn(model, batch)

    evaluate = fsdp.eval_step(counting_loss)
    examples = fsdp.shard_batch(batch())
    raw = evaluate(state, examples).compute()["loss"]
    got = evaluate(state.with_ema_params(), examples).compute()["loss"]
    assert len(traces) == 1

    model = filled(lambda: Model(nnx.Rngs(0)))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fsdp.fetch(state.ema))
    nnx.update(model, half)
    want = float(nnx.jit(lambda model: loss_fn(model, batch()).compute())(model))
    assert got == pytest.approx(want, rel=1e-5)
    assert raw != pytest.approx(want, rel=1e-2)


def test_averages_add_no_collectives_and_no_temporaries_and_are_updated_in_place():
    def compiled(decay: float | None) -> tuple[Any, jshard.TrainState]:
        fsdp = make_fsdp(policy(decay), replica=2)
        state = fsdp.abstract_state(Model, OPTIMIZER)
        step = fsdp.train_step(loss_fn, OPTIMIZER)
        return hlo.compile(step.lower(state, batch())), state

    (off, _), (on, state) = map(compiled, (None, DECAY))
    assert hlo.collectives(on.as_text()) == hlo.collectives(off.as_text())
    shards = sum(
        4 * int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(state.ema)
    )
    before, after = off.memory_analysis(), on.memory_analysis()
    assert after.argument_size_in_bytes - before.argument_size_in_bytes == shards
    assert after.alias_size_in_bytes - before.alias_size_in_bytes == shards
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < shards / 10


def test_by_default_there_are_none():
    state, with_averages = (
        make_fsdp(p).abstract_state(Model, OPTIMIZER)
        for p in (jshard.Policy(), policy())
    )
    assert state.ema is None
    leaves = [len(jax.tree.leaves(s)) for s in (state, with_averages)]
    assert leaves[1] - leaves[0] == len(jax.tree.leaves(state.params))
    with pytest.raises(jshard.UserError, match="no averages of its parameters"):
        state.with_ema_params()


@pytest.mark.parametrize("decay", [0.0, 1.0, 1, -0.1, float("nan"), True, "0.9"])
def test_a_decay_is_between_zero_and_one(decay):
    with pytest.raises(jshard.UserError, match=r"policy\.ema_decay: .* above 0"):
        jshard.Policy(ema_decay=decay)


@pytest.mark.parametrize("of_state", [None, DECAY])
def test_a_step_of_another_policy_than_the_state_says_what_does_not_agree(of_state):
    of_step = None if of_state else DECAY
    make = Model
    state = make_fsdp(policy(of_state)).abstract_state(make, OPTIMIZER)
    step = make_fsdp(policy(of_step)).train_step(loss_fn, OPTIMIZER)
    with pytest.raises(jshard.UserError, match=f"policy.ema_decay is {of_step}"):
        step.trace(state, batch())


def test_the_command_line_sets_the_decay():
    config = complete(ConfigDict({"steps": 1, "batch_size": 8}), "recipe.py")
    assert config.policy.ema_decay is None
    override(config, {"policy.ema_decay": 0.999}, "recipe.py")
    assert config.policy.ema_decay == 0.999
