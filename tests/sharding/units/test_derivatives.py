"""Derivatives of derivatives pass through Units and Stacks, within a step's loss."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from runs import compare, plain_run, run
from zoo_layers import Residual, make_stack


class Curved(nnx.Module):
    """Hessian-vector products of an energy, by the features.

    Training differentiates them once more, by the parameters.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = make_stack(Residual, rngs)
        self.last = jshard.Unit(Residual(rngs))

    def energy(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.last(self.blocks(x)) ** 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        gradient = jax.grad(self.energy)
        along = jnp.cos(x)
        return 0.1 * jax.grad(lambda x: jnp.vdot(gradient(x), along))(x)


@pytest.mark.quick("{}")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "knobs",
    [{}, {"prefetch": True, "remat": "dots", "reshard_after_forward": 2}],
    ids=str,
)
def test_hessian_vector_products_are_those_of_plain_flax(knobs: dict[str, Any]):
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    compare(run(Curved, policy), plain_run(Curved), 1e-12)
