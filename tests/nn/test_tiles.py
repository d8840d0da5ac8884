"""Layers that are applied to a few tokens at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jshard.nn.tiles import tiled


def gradients(module, x, tokens):
    graphdef, state = nnx.split(module)

    def loss(state, x):
        y = tiled(lambda m, x: jnp.sin(m(x)), nnx.merge(graphdef, state), x, tokens)
        # Each token counts differently, so their order does.
        return jnp.sum(y**2 * jnp.arange(1, y.size + 1).reshape(y.shape))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state, x)


@pytest.mark.quick("7")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tokens", [1, 6, 7, 24, 1000])
def test_tiles_compute_what_the_whole_does(tokens):
    module = nnx.Linear(4, 5, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = jax.device_put(np.random.default_rng(0).normal(size=(2, 12, 4)))
    got, want = gradients(module, x, tokens), gradients(module, x, 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(0, 12), (24, 12), (1000, 12), (23, 6), (12, 6), (11, 4), (6, 3), (5, 2), (1, 1)],
)
def test_a_tile_has_as_many_tokens_as_are_allowed(tokens, length):
    seen = []

    def fn(module, x):
        seen.append(x.shape)
        return x[..., 0]

    x = jax.ShapeDtypeStruct((2, 12, 4), jnp.float32)
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    got = jax.eval_shape(lambda x: tiled(fn, module, x, tokens), x)
    assert got.shape == (2, 12)
    assert set(seen) == {(2, length, 4)}


@pytest.mark.usefixtures("x64")
def test_gradients_of_tiles_are_summed_in_float32():
    options = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16, "use_bias": False}
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0), **options)
    module.kernel.set_value(jnp.ones((1, 1), jnp.bfloat16))
    graphdef, state = nnx.split(module)

    def loss(state, x):
        module = nnx.merge(graphdef, state)
        return jnp.sum(tiled(lambda m, x: m(x), module, x, 1).astype(jnp.float32))

    # 512 ones: in bfloat16 their sum stays at 256.
    grad = jax.jit(jax.grad(loss))(state, jnp.ones((1, 512, 1), jnp.bfloat16))
    assert float(grad.kernel.get_value()[0, 0]) == 512


def test_fewer_activations_exist_at_a_time():
    module = nnx.Sequential(
        nnx.Linear(8, 256, rngs=nnx.Rngs(0)),
        nnx.gelu,
        nnx.Linear(256, 8, rngs=nnx.Rngs(1)),
    )
    x = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32)

    def needed(tokens):
        compiled: Any = jax.jit(lambda x: gradients(module, x, tokens)).lower(x)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    hidden = 4096 * 256 * 4
    assert needed(0) > hidden > 2 * needed(256)
