"""`jshard.testing`: a user's own model, checked against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jshard
from jshard.sharding.settings import loss
from jshard.sharding.settings.mesh import TENSOR, sequence_axes
from jshard.sharding.step import step
from jshard.testing import check_step


def drawn(key, shape, dtype, out_sharding=None):
    """Initial values by NumPy: JAX would compile programs to draw them."""
    values = np.random.default_rng(shape).normal(size=shape) / np.sqrt(shape[-2])
    return jax.device_put(np.asarray(values, dtype))


class Block(nnx.Module):
    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        linear = functools.partial(nnx.Linear, kernel_init=drawn, rngs=rngs)
        self.up, self.down = linear(8, 16), linear(16, 8)

    def __call__(self, x):
        return x + jshard.nn.tensor_parallel(self.products, self.norm(x))

    def products(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class Prefix(Block):
    """A function of partial sums of which jshard does not know whether it is linear."""

    def products(self, x):
        return lax.cumprod(super().products(x), axis=2)


class OwnSum(Block):
    """Adds a weight once for each device."""

    def __call__(self, x):
        y = super().__call__(x)
        return (
            y + lax.psum(jnp.asarray(self.norm.scale), TENSOR) if sequence_axes() else y
        )


class Model(nnx.Module):
    splits_sequences = True

    def __init__(self, make, rngs):
        self.blocks = jshard.Stack(make, 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum((model(batch["x"]) - 1) ** 2), batch["x"].size)


def check(make, policy=None, **mesh):
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    x = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)
    check_step(fsdp, lambda rngs: Model(make, rngs), loss_fn, {"x": x})


@pytest.mark.quick("accumulate")
@pytest.mark.parametrize(
    ("policy", "mesh"),
    [
        (None, {"tensor": 2}),
        (
            jshard.Policy(min_shard_elements=0, remat="none", accumulate=2),
            {"replica": 2, "context": 2},
        ),
        (jshard.Policy(overrides={"blocks": {"prefetch": True}}), {}),
    ],
    ids=["tensor", "accumulate", "overrides"],
)
def test_a_right_model_passes_on_any_mesh_and_policy(policy, mesh):
    check(Block, policy, **mesh)


@pytest.mark.slow  # a right model passes above
def test_the_reference_is_the_gradient_of_jax(monkeypatch):
    """A fault that jshard had on one device, too, would not show beside itself."""
    seeds = loss.seeds
    twice = lambda *args: jax.tree.map(lambda x: 2 * x, seeds(*args))
    monkeypatch.setattr(step, "seeds", twice)
    with pytest.raises(AssertionError, match=r"the gradient of 'blocks\..*' differs"):
        check(Block)


def test_a_wrong_model_fails_and_the_worst_parameter_is_named():
    with pytest.raises(
        AssertionError, match=r"tensor=2.* 'blocks\.norm\.scale' differ"
    ):
        check(OwnSum, tensor=2)


def test_what_may_be_wrong_warns_and_names_the_check():
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2))
    with pytest.warns(
        UserWarning, match=r"is 'cumprod' linear .*jshard\.testing\.chec"
    ):
        trace(fsdp, Prefix)


@pytest.mark.slow  # that a wrong model fails is above
def test_the_check_that_a_warning_names_finds_what_is_wrong():
    with pytest.raises(AssertionError, match=r"the gradient of 'blocks\..*' differs"):
        check(Prefix, tensor=2)


def trace(fsdp, make):
    tx = optax.sgd(0.1)
    state = fsdp.abstract_state(lambda rngs: Model(make, rngs), tx)
    batch = fsdp.shard_batch({"x": np.ones((8, 4, 8), np.float32)})
    return fsdp.train_step(loss_fn, tx).trace(state, batch)
