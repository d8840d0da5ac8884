"""Modules split by path end with their split rows, or are refused in one line."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard


class Holder(nnx.Module):
    def __init__(self, make, rngs):
        self.inner = make(rngs)

    def __call__(self, x):
        return self.inner(x)


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(32, 16, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Bounded(Residual):
    def __call__(self, x):
        return jnp.tanh(self.down(jnp.tanh(self.up(x))))


class Dropping(Residual):
    make_dropout = nnx.Dropout

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = self.make_dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.down(jnp.tanh(self.up(x))))


class DroppingAlike(Dropping):
    make_dropout = jshard.Dropout


class Open(Residual):
    def __call__(self, x):
        return self.up(x)[..., :16]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Residual,
            r"'add' puts what all devices have beside .*_split_modules.py:\d+",
        ),
        (Bounded, "'tanh' is not linear in sums over split features"),
        (Dropping, "sums over split features are dropped on some devices alone"),
        (DroppingAlike, "Dropout: within tensor_parallel a device has some features"),
        (Open, "what is added up over devices is no sum over split features"),
    ],
)
def test_modules_that_do_not_end_with_split_rows_are_refused(module, message):
    class Outer(nnx.Module):
        splits_sequences = True

        def __init__(self, rngs):
            self.unit = jshard.Unit(Holder(module, rngs))

        def __call__(self, x):
            return self.unit(x)

    splits = {"unit.inner": jshard.nn.Split(columns=("up",), rows=("down",))}
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2), tensor_splits=splits)
    tx = optax.sgd(0.1)
    state = fsdp.abstract_state(Outer, tx)
    step = fsdp.train_step(lambda model, x: jshard.Mean(model(x).sum(), x.size), tx)
    with pytest.raises(jshard.UserError, match=message):
        step.trace(state, fsdp.shard_batch(np.ones((8, 4, 16))))
