"""Batch normalisation in a step: as on one device, over the whole batch."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

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
from parity import make_mesh
from runs import (
    as_unit,
    check_close,
    check_run,
    compare,
    everywhere,
    loss_fn,
    plain_run,
    run,
)
from zoo_layers import WIDTH, example, make_stack

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

TX = optax.sgd(0.1)


class Normed(nnx.Module):
    axis_name: Any = None

    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)
        self.norm = nnx.BatchNorm(
            WIDTH, rngs=rngs, param_dtype=float, axis_name=self.axis_name
        )
        # Flax makes these float32, whatever it is told.
        self.norm.mean.set_value(jnp.zeros(WIDTH))
        self.norm.var.set_value(jnp.ones(WIDTH))

    def __call__(self, x):
        return x + self.norm(jnp.tanh(self.dense(x)))


class NormedOverAxes(Normed):
    axis_name = ("replica", "fsdp")


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.blocks = make_stack(Normed, rngs)

    def __call__(self, x):
        return self.blocks(x)


@pytest.mark.quick("stack")  # a unit is in the next test
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Stacked, id="stack"),
        pytest.param(everywhere(Normed), id="everywhere"),
    ],
)
def test_batch_norm_is_that_of_the_whole_batch(model):
    check_run(model)


class Frozen(Normed):
    """Trains with the averages that it has, and drops nothing."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm.mean.set_value(jnp.ones(WIDTH))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.eval()

    def __call__(self, x):
        return self.drop(super().__call__(x))


class OverFrozen(nnx.Module):
    def __init__(self, rngs):
        self.backbone, self.head = make_stack(Frozen, rngs), Normed(rngs)

    def __call__(self, x):
        return self.head(self.backbone(x))


def test_what_is_in_eval_mode_stays_in_it_and_what_is_not_trains():
    check_run(OverFrozen)


def test_so_it_is_where_the_axes_are_named():
    compare(run(as_unit(NormedOverAxes)), plain_run(as_unit(Normed)))


def test_a_model_with_axis_name_runs_outside_of_steps():
    fsdp = jshard.FSDP(make_mesh(2, 2))
    given = filled(lambda: NormedOverAxes(nnx.Rngs(0)))
    model: Any = fsdp.model(fsdp.from_model(given, optax.identity()))
    want = filled(lambda: Normed(nnx.Rngs(0)))
    got, want = (nnx.jit(lambda m, x: m(x))(m, example()) for m in (model, want))
    check_close(got, want, 1e-9)


def test_an_axis_of_another_program_is_one_line():
    class OfPmap(Normed):
        axis_name = "batch"

    with pytest.raises(jshard.UserError, match=r"axis_name='batch'\): a step has no"):
        run(OfPmap)


def test_batch_norm_with_accumulate_takes_each_micro_batch_for_a_batch():
    policy = jshard.Policy(min_shard_elements=0, accumulate=2)
    fsdp = jshard.FSDP(make_mesh(1, 2), policy)
    module: Any = filled(lambda: Normed(nnx.Rngs(0)))
    state = fsdp.from_model(module, TX)
    x = np.asarray(example())
    step = fsdp.train_step(loss_fn, TX)
    state, metrics = step(state, fsdp.shard_batch(x))

    # Each device's part is cut in two; a micro-batch is such a part of every device.
    micro = x.reshape(2, 2, -1, WIDTH).swapaxes(0, 1).reshape(2, -1, WIDTH)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest):
        total = 0.0
        for part in micro:
            model = nnx.merge(graphdef, params, rest, copy=True)
            total += loss_fn(model, jnp.asarray(part)).total
            rest = nnx.state(model, nnx.Not(nnx.Param))
        return total / len(x), rest

    (value, rest), grads = jax.device_get(loss(params, rest))
    check_close(metrics["loss"], value, 1e-9)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, jax.device_get(params), grads)
    check_close(fsdp.fetch(state.params), want, 1e-9)
    check_close(fsdp.fetch(state.model_state), rest, 1e-9)
    note = describe(fsdp, state, x, step)
    assert "norm: statistics of one micro-batch" in note
    assert "each of the 2 micro-batches updates" in note
