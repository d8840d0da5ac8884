"""What a layer keeps for its backward, by its remat policy. No step is compiled."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jshard
from jshard.sharding.layout.placement import Placement, Sharding
from jshard.sharding.settings.policy import UnitPolicy
from jshard.sharding.units import layers
from jshard.sharding.units.linearize import Inputs, Layer, trace_layer
from jshard.sharding.units.stack import segments_of

LENGTH, EXAMPLES, WIDTH, HIDDEN = 5, 3, 4, 7
PLACES = [Placement(Sharding(None)), Placement(Sharding(None))]
X, UP = (EXAMPLES, WIDTH), (EXAMPLES, HIDDEN)


TABLE = np.linspace(1, 2, HIDDEN, dtype=np.float32)  # is known when a layer is traced


def layer(weights: Any, xs: Any, x: Any, args: Any) -> Any:
    """Reads what depends on weights alone, on an argument alone, and on neither."""
    (up, down), (state,), (shared,) = weights, xs, args
    constant = jnp.sin(jnp.arange(WIDTH, dtype=x.dtype))
    h = checkpoint_name((x * constant) @ jnp.exp(up * TABLE) * state, "hidden")
    y = jnp.sin(h) @ down
    return (y * y * jnp.exp(shared), None), [], []


def inputs() -> Inputs:
    rng = np.random.default_rng(0)
    make = lambda *shape: jax.device_put(
        np.asarray(rng.normal(size=shape), jnp.float32)
    )
    weights = [make(WIDTH, HIDDEN), make(HIDDEN, WIDTH)]
    return Inputs(weights, [make(*UP)], make(*X), [make(WIDTH)])


def linearized(remat: Any, fn: Any = layer) -> tuple[Layer, list[Any]]:
    """A layer, and the arrays that its program closes over, the last of its args."""
    traced = trace_layer(fn, inputs(), PLACES)
    made = Layer(traced, PLACES, UnitPolicy(remat), straight=False)
    return made, list(traced.program.consts)


def kept(made: Layer, consts: list[Any]) -> Counter:
    """Shapes of the residuals that a layer's forward returns."""
    given = inputs()
    given = given._replace(args=[*given.args, *consts])
    _, residuals = jax.eval_shape(made.forward, given)
    return Counter(x.shape for x in residuals)


# Nothing of the shape of a weight, of the state, of the argument or of a constant. The
# carry is kept by all, and an activation that is read twice is kept once.
POLICIES: dict[str, tuple[Any, dict]] = {
    "full": ("full", {X: 1}),
    "dots": ("dots", {X: 2, UP: 1}),
    "names": (jshard.Names("hidden"), {X: 1, UP: 1}),
    "none": ("none", {X: 3, UP: 3}),
    "everything": (jax.checkpoint_policies.everything_saveable, {X: 3, UP: 3}),
}
policies = pytest.mark.parametrize("remat", POLICIES)


@pytest.mark.core
@policies
def test_a_layer_keeps_activations_as_remat_says_and_nothing_that_can_be_rebuilt(remat):
    policy, want = POLICIES[remat]
    assert kept(*linearized(policy)) == want


@policies
def test_what_is_kept_and_rebuilt_gives_the_gradients_of_the_layer(remat):
    (made, consts), given = linearized(POLICIES[remat][0]), inputs()
    cotangent = jnp.cos(given.carry)

    @jax.jit
    def both(given: Inputs) -> Any:
        traced = given._replace(args=[*given.args, *consts])
        ((y, _), *_), residuals = made.forward(traced)
        cotangents = ((cotangent, None), [], [])
        own = made.transpose(traced._replace(carry=None), residuals, cotangents)
        own = own._replace(args=own.args[: len(given.args)])
        want, pullback = jax.vjp(lambda given: layer(*given)[0][0], given)
        return (y, own), (want, *pullback(cotangent))

    got, want = both(given)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_a_layer_closes_over_is_not_kept_for_each_layer():
    found = []

    def trace(shared: jax.Array) -> None:
        closed = lambda weights, xs, x, _: layer(weights, xs, x, [shared])
        found.append(kept(*linearized("none", closed)))

    jax.eval_shape(trace, jnp.ones(WIDTH))
    assert found == [POLICIES["none"][1]]


@pytest.mark.parametrize("first_k", [None, 0, 1, 3, LENGTH, LENGTH + 1])
def test_the_first_k_layers_alone_are_recomputed(first_k):
    policy = UnitPolicy("full", first_k=first_k)
    runs = layers.spans(policy, LENGTH)
    traced = trace_layer(layer, inputs(), PLACES)
    segments = segments_of(traced, PLACES, policy, runs, prefetch=False)
    full, none, consts = POLICIES["full"][1], POLICIES["none"][1], traced.program.consts
    of_layers = [
        kept(segment.layer, consts)
        for segment in segments
        for _ in range(segment.length)
    ]
    first = LENGTH if first_k is None else min(first_k, LENGTH)
    assert of_layers == [full] * first + [none] * (LENGTH - first)
