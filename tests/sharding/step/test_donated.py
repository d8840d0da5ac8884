"""A state that was donated to a step is refused in one line wherever it is read."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_mesh
from zoo_layers import Dense

TX = optax.adam(1e-3)
BATCH = np.ones((16, 8), np.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = jshard.Unit(Dense(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def loss_fn(model: Model, x: jax.Array) -> jshard.Mean:
    y = model(x)
    return jshard.Mean(jnp.sum(y**2), y.size)


def save(fsdp: jshard.FSDP, state: Any, folder: Any) -> None:
    with jshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(state)


READERS = {
    "train_step": lambda fsdp, state, _: fsdp.train_step(loss_fn, TX)(state, BATCH),
    "eval_step": lambda fsdp, state, _: fsdp.eval_step(loss_fn)(state, BATCH),
    "predict_step": lambda fsdp, state, _: fsdp.predict_step(Model.__call__)(
        state, BATCH
    ),
    "model": lambda fsdp, state, _: fsdp.model(state),
    "fetch": lambda fsdp, state, _: fsdp.fetch(state.params),
    "put": lambda fsdp, state, _: fsdp.put(state, step=np.int32(0)),
    "copy": lambda fsdp, state, _: copy.deepcopy(state),
    "averages": lambda fsdp, state, _: dataclasses.replace(
        state, ema=state.params
    ).with_ema_params(),
    "save": save,
}


@pytest.mark.quick("8")
@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_that_was_donated_is_refused_in_one_line(devices, tmp_path):
    fsdp = jshard.FSDP(make_mesh(1, devices), jshard.Policy(min_shard_elements=0))
    donated = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), TX)
    step, model = fsdp.train_step(loss_fn, TX), fsdp.model(donated)
    state, _ = step(donated, BATCH)
    readers = {
        "the same step": lambda *_: step(donated, BATCH),
        "a model of it": lambda *_: fsdp.from_model(model, TX),
    } | READERS
    for name, read in readers.items():
        with pytest.raises(
            jshard.UserError, match="go on with the state that"
        ) as error:
            read(fsdp, donated, tmp_path / name)
        assert "\n" not in str(error.value), name
    state, _ = step(state, BATCH)  # the one that was returned is fine
    assert int(state.step) == 2


@pytest.mark.quick("copy-None")
@pytest.mark.parametrize("offload", [None, "all"])
@pytest.mark.parametrize("copied", [jshard.TrainState.copy, copy.deepcopy])
def test_a_copy_is_trained_on_as_the_state_would_be(copied, offload):
    policy = jshard.Policy(min_shard_elements=0, offload=offload)
    fsdp = jshard.FSDP(make_mesh(1, 8), policy)
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), TX)
    kept = copied(state)
    places = [[x.sharding for x in jax.tree.leaves(tree)] for tree in (state, kept)]
    assert places[0] == places[1]
    step = fsdp.train_step(loss_fn, TX)
    (one, _), (other, _) = step(state, BATCH), step(kept, BATCH)
    jax.tree.map(
        np.testing.assert_array_equal, fsdp.fetch(one.params), fsdp.fetch(other.params)
    )


def test_a_batch_that_was_donated_is_refused_in_one_line():
    fsdp = jshard.FSDP(make_mesh(1, 2))
    state = fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), TX)
    step = fsdp.predict_step(Model.__call__, donate_batch=True)
    batch = fsdp.shard_examples(BATCH)
    step(state, batch)
    with pytest.raises(
        jshard.UserError, match=r"batch was donated .*\.shard_examples$"
    ):
        step(state, batch)


def test_text_in_the_batch_of_a_step_is_refused_by_its_field():
    fsdp = jshard.FSDP(make_mesh(1, 2))
    step = fsdp.eval_step(lambda model, batch: loss_fn(model, batch["x"]))
    batch = {"x": BATCH, "ids": ["a"] * len(BATCH)}
    with pytest.raises(jshard.UserError, match=r"'ids' has the dtype <U1, .* leave it"):
        step(fsdp.from_model(filled(lambda: Model(nnx.Rngs(0))), TX), batch)


def test_what_is_no_state_is_refused_in_one_line():
    fsdp = jshard.FSDP(make_mesh(1, 2))
    with pytest.raises(jshard.UserError, match=r"state of fsdp\.init, not a Model$"):
        fsdp.train_step(loss_fn, TX)(filled(lambda: Model(nnx.Rngs(0))), BATCH)  # pyright: ignore[reportArgumentType]
