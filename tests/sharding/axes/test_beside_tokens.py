"""Beside its tokens `tensor_parallel` is given what `tokens=` says, or refuses it."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.axes.context import whole_sequences

TABLE = jnp.arange(16.0).reshape(4, 4)  # of heads, say: begins like (B, T) of a device


class Shifted(nnx.Module):
    """An MLP whose hidden features are shifted by what ``given`` makes."""

    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, given, tokens, rngs):
        self.given, self.tokens = given, tokens
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.up, self.down = linear(4, 8), linear(8, 4)
        self.table = nnx.Param(jnp.zeros((4, 4)))

    def __call__(self, x_BTD, classes_B):
        given = self.given(self, x_BTD, classes_B)
        fn = lambda x, beside: self.down(jnp.tanh(self.up(x)) * jnp.sum(beside))
        return jshard.nn.tensor_parallel(fn, x_BTD, given, tokens=self.tokens)


class OfShifted(nnx.Module):
    splits_sequences = True

    def __init__(self, given, tokens, rngs):
        make = lambda rngs: Shifted(given, tokens, rngs)
        self.blocks = jshard.Stack(make, 2, rngs=rngs)

    def __call__(self, batch):
        return self.blocks(batch["x"], batch["classes"])


NO_TOKENS = {
    "a constant": lambda module, x_BTD, classes_B: TABLE,
    "a parameter": lambda module, x_BTD, classes_B: module.table.get_value(),
    "features of classes": lambda module, x_BTD, classes_B: module.table.get_value()[
        classes_B
    ],
    "a mean over tokens": lambda module, x_BTD, classes_B: jnp.mean(
        whole_sequences(x_BTD), axis=1
    ),
}
TOKENS = {
    "features": lambda module, x_BTD, classes_B: x_BTD + 1,
    "positions": lambda module, x_BTD, classes_B: jnp.broadcast_to(
        jshard.nn.positions(4), (4, 4)
    ),
}


def trace_shifted(given, tokens):
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2, fsdp=4))
    batch = {"x": np.ones((16, 8, 4), np.float32), "classes": np.zeros(16, np.int32)}
    squares = lambda model, batch: jshard.Mean(jnp.sum(model(batch) ** 2), 1)
    make = lambda rngs: OfShifted(given, tokens, rngs)
    state = fsdp.abstract_state(make, optax.sgd(1.0))
    fsdp.train_step(squares, optax.sgd(1.0)).trace(state, fsdp.shard_batch(batch))


def refused(given, tokens):
    with pytest.raises(jshard.UserError) as error:
        trace_shifted(given, tokens)
    return str(error.value)


@pytest.mark.parametrize("given", NO_TOKENS.values(), ids=NO_TOKENS)
def test_what_has_the_shape_of_tokens_by_chance_stays_whole_if_that_is_said(given):
    message = refused(given, None)
    assert "argument 'beside' of fn, float32[4,4], begins like its tokens" in message
    assert "tokens=('beside',) if" in message
    assert "is the same on all devices" in refused(given, ("beside",))
    trace_shifted(given, ())


@pytest.mark.parametrize("given", TOKENS.values(), ids=TOKENS)
def test_tokens_beside_tokens_are_said(given):
    assert "begins like its tokens, [4, 4]" in refused(given, None)
    trace_shifted(given, ("beside",))


def test_names_that_are_no_arguments_and_arrays_that_are_no_tokens_are_refused():
    features = TOKENS["features"]
    assert "fn is given no 'besides' beside 'x'; it is given beside" in refused(
        features, ("besides",)
    )
    turned = lambda module, x_BTD, classes_B: x_BTD[:, :2]
    assert "'beside' is float32[4,2,4]; what is of tokens begins with [4, 4]" in (
        refused(turned, ("beside",))
    )
    trace_shifted(turned, None)
