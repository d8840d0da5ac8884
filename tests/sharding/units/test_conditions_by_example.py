"""Conditions for each example, under ``jax.vmap``, around units: right, or refused.

JAX selects each operand of such a branch by its predicate, and a weight's shard may be
one, before its gather: one device would mask the gradients of another's examples.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
TX = optax.sgd(1.0)

pytestmark = pytest.mark.filterwarnings(
    "ignore:parameter '.*' is read outside of its unit"
)


class Routed(nnx.Module):
    """Two experts, each for some of the examples."""

    def __init__(self, rngs: nnx.Rngs):
        self.one = jshard.Unit(nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.two = jshard.Unit(nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError


class ByCond(Routed):
    def __call__(self, x):
        route = lambda v: jax.lax.cond(v[0] > 0, self.one, self.two, v)
        return jax.vmap(route)(x)


class BySwitch(Routed):
    def __call__(self, x):
        branches = [self.one, self.two, lambda v: v]
        route = lambda v: jax.lax.switch(jnp.int32(v[0] > 0), branches, v)
        return jax.vmap(route)(x)


class ByRead(Routed):
    """Reads a weight in the branch, outside of its unit."""

    def __call__(self, x):
        one = lambda v: v @ self.one.kernel[...]
        return jax.vmap(lambda v: jax.lax.cond(v[0] > 0, one, lambda v: v, v))(x)


class ByWhere(Routed):
    def __call__(self, x):
        return jnp.where(x[:, :1] > 0, self.one(x), self.two(x))


class ByGathered(Routed):
    def __call__(self, x):
        one, two = jshard.gathered(self.one), jshard.gathered(self.two)
        return jax.vmap(lambda v: jax.lax.cond(v[0] > 0, one, two, v))(x)


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    errors = (model(x) - 1) ** 2
    return jshard.Mean(jnp.sum(errors), errors.size)


def trained(make: type) -> tuple[Any, Any]:
    """The parameters after a step, and what they were."""
    model = filled(lambda: make(nnx.Rngs(0)))
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=1))
    state = fsdp.from_model(model, TX)
    state, _ = fsdp.train_step(loss_fn, TX)(state, fsdp.shard_batch(X))
    return fsdp.fetch(state.params), model


@pytest.mark.parametrize("make", [ByCond, BySwitch, ByRead])
def test_a_shard_that_a_predicate_selects_is_refused_with_what_to_write(make):
    message = r"weight '(one|two)\.\w+' .* jshard\.gathered\(module\)"
    with pytest.raises(jshard.UserError, match=message):
        trained(make)


@pytest.mark.quick("ByGathered")
@pytest.mark.parametrize("make", [ByWhere, ByGathered])
def test_what_is_selected_or_gathered_before_trains_as_on_one_device(make):
    got, model = trained(make)
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    @jax.grad
    def gradient(params):
        return loss_fn(nnx.merge(graphdef, params), jnp.asarray(X)).compute()

    want = jax.tree.map(lambda p, g: p - g, params, gradient(params))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
