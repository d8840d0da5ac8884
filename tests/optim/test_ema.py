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
from decoder import Sizes, loss_fn, lower_step, make_decoder, make_fsdp
from jshard.config.overrides import override
from jshard.config.run_config import complete
from jshard.optim import ema

SIZES = Sizes(layers=2)
OPTIMIZER = optax.sgd(0.5, momentum=0.9)
DECAY = 0.3  # the first two steps of a run average with less


def policy(ema_decay: float | None = DECAY, **knobs: Any) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, ema_decay=ema_decay, **knobs)


def batch() -> dict[str, Any]:
    shape = (2, 16, SIZES.length)
    tokens = np.random.default_rng(0).integers(0, SIZES.vocab, shape, np.int32)
    return {"tokens": tokens[0], "targets": tokens[1]}


@functools.cache
def trained() -> tuple[jshard.FSDP, jshard.TrainState]:
    """A state with bfloat16 parameters after two steps; not to be donated."""
    half = jshard.Precision(param="bfloat16")
    fsdp = make_fsdp(policy(precision=half), replica=2)
    state = fsdp.init(make_decoder(SIZES), OPTIMIZER)
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
    variant = parity.Variant(layers=1, frozen=True)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=replica), policy(accumulate=accumulate))
    tx = parity.optimizer("adamw", jshard.optim.per_layer)

    def loss(model: nnx.Module, batch: dict[str, Any]) -> jshard.Mean:
        [(_, total, count)], _ = parity.sums(variant, model, batch)
        return jshard.Mean(total, count)

    make_model = parity.make_model(variant, units=False)
    state = fsdp.init(make_model, tx, wrt=parity.trained(variant))
    step = fsdp.train_step(loss, tx)
    history = [parity.by_path(fsdp.fetch(state.params))]
    for examples in parity.batches(variant):
        state, _ = step(state, fsdp.shard_batch(examples))
        history.append(parity.by_path(fsdp.fetch(state.params)))
    got = parity.by_path(fsdp.fetch(state.ema))
    assert not any("embed" in path for path in got), "frozen parameters are averaged"
    assert parity.worst(got, averages(history)) <= 1e-14


def test_averages_start_as_the_parameters_and_share_no_buffers_with_them():
    state = make_fsdp(policy()).init(make_decoder(SIZES), OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, state.ema, state.params)

    def buffers(tree: Any) -> set[int]:
        shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
        return {shard.data.unsafe_buffer_pointer() for shard in shards}

    # A step donates both, and one buffer cannot be donated twice.
    assert not buffers(state.ema) & buffers(state.params)
    assert not buffers(state.ema) & buffers(state.with_ema_params().params)


@pytest.mark.slow
def test_averages_are_sharded_like_the_parameters():
    fsdp, state = trained()
    abstract = fsdp.abstract_state(make_decoder(SIZES), OPTIMIZER)
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

    model = make_decoder(SIZES)(nnx.Rngs(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), fsdp.fetch(state.ema))
    nnx.update(model, half)
    want = float(loss_fn(model, batch()).compute())
    assert got == pytest.approx(want, rel=1e-5)
    assert raw != pytest.approx(want, rel=1e-2)


def test_averages_add_no_collectives_and_no_temporaries_and_are_updated_in_place():
    (off, _), (on, state) = (
        lower_step(make_fsdp(policy(decay), replica=2), SIZES)
        for decay in (None, DECAY)
    )
    off, on = hlo.compile(off), hlo.compile(on)
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
        make_fsdp(p).abstract_state(make_decoder(SIZES), OPTIMIZER)
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
    make = make_decoder(SIZES)
    state = make_fsdp(policy(of_state)).abstract_state(make, OPTIMIZER)
    step = make_fsdp(policy(of_step)).train_step(loss_fn, OPTIMIZER)
    with pytest.raises(jshard.UserError, match=f"policy.ema_decay is {of_step}"):
        step.trace(state, batch())


def test_the_command_line_sets_the_decay():
    config = complete(ConfigDict({"steps": 1, "batch_size": 8}), "recipe.py")
    assert config.policy.ema_decay is None
    override(config, {"policy.ema_decay": 0.999}, "recipe.py")
    assert config.policy.ema_decay == 0.999
