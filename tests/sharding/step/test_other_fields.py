"""Fields that are not the state's own are refused by name and path, in one line."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from parity import make_mesh

POLICY = jshard.Policy(min_shard_elements=1)
FSDP = jshard.FSDP(make_mesh(1, 8), POLICY, units=(nnx.Linear,))
BELIEF, ADAM = optax.adabelief(1e-2), optax.adam(1e-2)


def make_model(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs))


def loss_fn(model: Any, x: Any) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.size)


STATE = FSDP.abstract_state(make_model, ADAM)
BATCH = np.ones((8, 8), np.float32)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.sgd(1.0), r"has \[0\]\.count, which the optimizer does not keep; give"),
        (
            optax.amsgrad(1.0),
            r"has no \[0\]\.nu_max\['layers'\]\[0\]\['bias'\], which the optimizer k",
        ),
        (BELIEF, "has fields of other types; give train_step the optimizer that fsdp"),
    ],
)
def test_a_step_of_another_optimizer_is_refused(tx, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        FSDP.train_step(loss_fn, tx).trace(STATE, BATCH)
    assert str(error.value).startswith("the state was made with another optimizer")
    assert "\n" not in str(error.value)


PARAMS = STATE.params
KERNEL = nnx.from_flat_state(nnx.to_flat_state(PARAMS)[1:])
OTHERS: dict[str, tuple[str, Any, str]] = {
    "nested": (
        "params",
        nnx.State({"a": PARAMS}),
        r"state\.params has a State at 'a', where the model has a variable or a dict",
    ),
    "lookahead": (
        "params",
        optax.LookaheadParams(PARAMS, PARAMS),
        r"state\.params is LookaheadParams; it must be an nnx\.State .*replace\(state,",
    ),
    "dict": ("frozen", {}, r"state\.frozen is dict; it must be an nnx\.State"),
    "pure": (
        "params",
        nnx.as_pure(PARAMS),
        r"state\.params has a .* at 'layers\.0\.bias', where the model has a variable",
    ),
    "none": ("model_state", None, r"state\.model_state is None; it must be"),
    "averages": (
        "ema",
        KERNEL,
        r"state\.params has 'layers\.0\.bias', state\.ema has not",
    ),
    "fewer": (
        "params",
        KERNEL,
        "have 1 variables, and the model has 2",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_of_another_structure_is_refused_with_its_path(name):
    field, value, message = OTHERS[name]
    state = dataclasses.replace(STATE, **{field: value})
    with pytest.raises(jshard.UserError, match=message) as error:
        FSDP.eval_step(loss_fn).trace(state, BATCH)
    assert "\n" not in str(error.value)


def test_an_optimizer_of_pairs_of_parameters_is_refused():
    with pytest.raises(jshard.UserError, match=r"optax\.lookahead.*ema_decay=\.\.\."):
        FSDP.init(make_model, optax.lookahead(ADAM, 5, 0.5))
