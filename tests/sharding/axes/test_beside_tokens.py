"""What `tensor_parallel` is given beside its tokens: other tokens, or an error."""

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

    def __init__(self, given, closes_over, rngs):
        self.given, self.closes_over = given, closes_over
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.up, self.down = linear(4, 8), linear(8, 4)
        self.table = nnx.Param(jnp.zeros((4, 4)))

    def __call__(self, x_BTD, classes_B):
        given = self.given(self, x_BTD, classes_B)
        fn = lambda x, y: self.down(jnp.tanh(self.up(x)) * jnp.sum(y))
        if self.closes_over:
            return jshard.nn.tensor_parallel(lambda x: fn(x, given), x_BTD)
        return jshard.nn.tensor_parallel(fn, x_BTD, given)


class OfShifted(nnx.Module):
    splits_sequences = True

    def __init__(self, given, closes_over, rngs):
        make = lambda rngs: Shifted(given, closes_over, rngs)
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


def trace_shifted(given, closes_over):
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2, fsdp=4))
    batch = {"x": np.ones((16, 8, 4), np.float32), "classes": np.zeros(16, np.int32)}
    squares = lambda model, batch: jshard.Mean(jnp.sum(model(batch) ** 2), 1)
    make = lambda rngs: OfShifted(given, closes_over, rngs)
    state = fsdp.abstract_state(make, optax.sgd(1.0))
    fsdp.train_step(squares, optax.sgd(1.0)).trace(state, fsdp.shard_batch(batch))


@pytest.mark.parametrize("given", NO_TOKENS.values(), ids=NO_TOKENS)
def test_what_has_the_shape_of_tokens_by_chance_is_refused(given):
    with pytest.raises(jshard.UserError, match=r"fn is given float32.4,4., .* close"):
        trace_shifted(given, closes_over=False)
    trace_shifted(given, closes_over=True)


@pytest.mark.parametrize("given", TOKENS.values(), ids=TOKENS)
def test_tokens_beside_tokens_are_no_table(given):
    trace_shifted(given, closes_over=False)
