"""Evaluations in which some devices have no example of their own."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from split_models import SEQUENCES, batch, loss_fn, made


@pytest.mark.slow  # by default test_evaluation.py, with a small model
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("experts", {"expert": 2}),
        ("uneven experts", {"expert": 2, "fsdp": 4}),
        ("experts", {"context": 2, "expert": 2}),
        ("llama", {"tensor": 2, "replica": 2}),
    ],
)
def test_experts_and_their_load_are_those_of_the_examples_that_count(model, sizes):
    mesh: Any = jshard.make_mesh(**sizes)
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(mesh, policy, sequences=SEQUENCES)
    groups = 8 // sizes.get("context", 1) // sizes.get("tensor", 1)
    state = fsdp.from_model(made(model), optax.sgd(1.0))
    of = lambda rows: {name: x[rows] for name, x in batch(True, 0).items()}
    filled_up = fsdp.shard_batch(of(np.minimum(np.arange(groups), 2)))
    means = fsdp.eval_step(loss_fn, examples=3)(state, filled_up)
    graphdef, params = nnx.split(made(model))

    @jax.jit
    def plain(params: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        model.eval()
        return loss_fn(model, of(slice(3))).compute()

    np.testing.assert_allclose(means.compute()["loss"], plain(params), rtol=1e-12)
