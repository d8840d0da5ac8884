"""A run that ends for its loss says why, where that can be known."""

import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.system.errors import RunFailed
from jshard.training.non_finite import beyond_vocabulary, check_finite


def metrics(loss, norm):
    return {"loss": loss, "grad_norm": norm}


def model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Embed(4, 2, rngs=rngs), jshard.Unit(nnx.Embed(9, 2, rngs=rngs))
    )


def test_finite_losses_pass():
    check_finite(4, metrics(1.0, 2.0))
    check_finite(5, metrics(0.0, 0.0))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_that_counts_nothing_is_told_with_its_step(scaled):
    given = metrics(np.nan, 0.0) | ({"loss_scale": 8.0} if scaled else {})
    with pytest.raises(RunFailed, match="loss of step 4 counts nothing"):
        check_finite(4, given)


def test_the_cause_is_looked_for_at_the_step_that_fails():
    asked = []

    def find_cause(step):
        asked.append(step)
        return "because of this"

    failing = metrics(np.inf, 3.0)
    with pytest.raises(RunFailed, match="loss is inf at step 8: because of this"):
        check_finite(8, failing, find_cause)
    assert asked == [8]
    with pytest.raises(RunFailed, match="is inf at step 8: lower the learning rate"):
        check_finite(8, failing)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.array([[3, 9]]), "has token 9 in 'inputs', and the model's embedding"),
        (np.array([[3, 8]]), ""),
        (np.array([[3.0, 99.0]]), ""),
        (np.zeros((0, 2), np.int32), ""),
    ],
)
def test_tokens_beyond_the_largest_embedding_are_named(x, said):
    found = beyond_vocabulary({"inputs": x}, model())
    assert found.startswith(f"its batch {said}" if said else "")
    assert bool(found) == bool(said)
    assert not said or "has 9 rows" in found


def test_a_model_without_embeddings_tells_nothing():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert beyond_vocabulary({"x": np.array([99])}, linear) == ""
