"""``jshard.optim.muon`` is optax's, with the same state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard

TALL = optax.contrib.MuonDimensionNumbers((0, 1), 2)
CUBES = lambda params: jax.tree.map(lambda p: TALL if p.ndim == 3 else None, params)
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adaptive": {"nesterov": False, "adaptive": True, "weight_decay": 0.1},
    "aol": {"preconditioning": "aol", "mu_dtype": jnp.float32},
    "dion": {"ns_coeffs": "dion", "consistent_rms": 0.2},
    "numbers": {"muon_weight_dimension_numbers": CUBES},
    "a tree": {
        "muon_weight_dimension_numbers": {
            "tall": optax.contrib.MuonDimensionNumbers(1, -2),
            "wide": None,
            "cube": TALL,
            "bias": None,
        }
    },
    "adam": {
        "adam_b1": 0.8,
        "adam_b2": 0.9,
        "adam_eps_root": 0.1,
        "adam_weight_decay": 0.1,
        "adam_learning_rate": 0.5,
    },
    "steps": {
        "ns_steps": 3,
        "beta": 0.5,
        "eps": 1e-3,
        "weight_decay": 0.1,
        "weight_decay_mask": lambda params: jax.tree.map(lambda p: len(p) > 4, params),
    },
}


def run(tx: optax.GradientTransformation, params: Any) -> Any:
    """Parameters after two steps with gradients that each number has of its own."""
    state = tx.init(params)
    for step in range(2):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.quick("muon", "a tree")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIONS)
def test_muon_on_whole_layers_is_muon_with_the_same_state(name):
    shapes = {"tall": (5, 3), "wide": (4, 6), "cube": (2, 3, 4), "bias": (5,)}
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=s)) for name, s in shapes.items()}
    rate = optax.linear_schedule(1e-2, 1e-3, 5)
    ours = jshard.optim.muon(rate, **OPTIONS[name])
    theirs = jshard.optim.per_layer(optax.contrib.muon(rate, **OPTIONS[name]))
    got, want = jax.jit(lambda params: (run(ours, params), run(theirs, params)))(params)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    jax.tree.map(close, got, want)
    starts = [jax.eval_shape(x.init, params) for x in (ours, theirs)]
    assert starts[0] == starts[1]
    _, after = jax.eval_shape(ours.update, params, starts[0], params)
    same = lambda x, y: x.shape == y.shape and x.dtype == y.dtype
    assert jax.tree.all(jax.tree.map(same, after, starts[1]))


def test_the_rate_of_muon_can_be_injected():
    tx = optax.inject_hyperparams(jshard.optim.muon)(learning_rate=1e-3)
    params = {"matrix": jnp.ones((3, 4)), "bias": jnp.ones(3)}
    updates, state = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert state.hyperparams["learning_rate"].shape == ()
