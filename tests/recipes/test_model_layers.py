"""models/layers.py: the initial values that the models share."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jshard.models import layers
from jshard.models.gpt import Block, GPTConfig

CONFIG = types.SimpleNamespace(
    width=64, num_layers=8, dtype=jnp.float32, param_dtype=jnp.float32
)


def test_layers_that_end_a_residual_branch_start_smaller_by_the_root_of_their_number():
    # Two branches a block: GPT-2's 0.02 over the root of 16.
    assert layers.residual_std(CONFIG) == pytest.approx(0.005)


def test_weights_have_the_deviation_that_they_are_given():
    table = layers.embedding(CONFIG, 200, nnx.Rngs(0), 0.1)
    assert table.embedding[...].shape == (200, 64)
    assert np.std(table.embedding[...]) == pytest.approx(0.1, rel=0.05)
    linear = layers.linear(CONFIG, 100, 80, nnx.Rngs(0), 0.3, bias=False)
    assert np.std(linear.kernel[...]) == pytest.approx(0.3, rel=0.05)
    assert linear.bias is None


def test_a_blocks_branches_end_in_such_layers():
    config = GPTConfig(width=64, num_layers=8, num_heads=4)
    block = Block(config, rngs=nnx.Rngs(0))
    for linear, want in (
        (block.attention.qkv, 0.02),
        (block.attention.out, 0.005),
        (block.up, 0.02),
        (block.down, 0.005),
    ):
        assert np.std(linear.kernel[...]) == pytest.approx(want, rel=0.05)
