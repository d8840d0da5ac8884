"""`pointwise_form`: whether a program does the same with each element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.sharding.update.stacks.pointwise import pointwise_form

RATES = np.linspace(0.1, 1, 3, dtype=np.float32)


def form(fn, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pointwise_form(jax.make_jaxpr(fn)(x, x), (0, 1))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: 0.9 * x + 0.1 * y**2,
        lambda x, y: jnp.where(x > 0, x, jax.nn.relu(y)) / (jnp.sqrt(y) + 1e-8),
        lambda x, y: jax.lax.cond(True, lambda z: z * 2, lambda z: z, x + y),
        lambda x, y: jnp.clip(x, -1, 1).astype(jnp.bfloat16),
        lambda x, y: (jnp.zeros_like(x), y),
        jax.jit(lambda x, y: jnp.sign(x) * jnp.tanh(y)),
        # A norm of all arrays.
        lambda x, y: x / jnp.sqrt(0 + jnp.sum(x**2) + jnp.sum(y**2)),
        lambda x, y: y * jax.jit(lambda a, b: a + b)(jnp.sum(x), jnp.sum(y)),
    ],
)
def test_what_does_the_same_with_each_element_has_one_form_for_all_shapes(fn):
    assert form(fn, (3, 4, 4)) is not None
    assert form(fn, (3, 4, 4)) == form(fn, (4, 4)) == form(fn, (7,)) == form(fn, ())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x / jnp.linalg.norm(x),
        lambda x, y: x - x.mean(axis=-1, keepdims=True),
        lambda x, y: x @ y,
        lambda x, y: x.reshape(-1).reshape(x.shape),
        lambda x, y: jnp.roll(x, 1, axis=0),
        lambda x, y: x.at[0].set(0.0),
        lambda x, y: x * jnp.arange(3.0)[:, None],
        lambda x, y: x * RATES[:, None],
        lambda x, y: x[:1] + y,
        lambda x, y: jnp.sort(x),
        lambda x, y: jnp.cumsum(x, axis=0),
        lambda x, y: x.T,
        lambda x, y: x + jax.random.normal(jax.random.key(0), x.shape),
        lambda x, y: jax.lax.cond(x.sum() > 0, lambda z: z, lambda z: -z, y),
        lambda x, y: jax.lax.cond(True, lambda z: z / z.sum(), lambda z: z, y),
        jax.jit(lambda x, y: x / x.max()),
        # Sums of one of the arrays, of one twice, of what mixes two, or of sums.
        lambda x, y: x / jnp.sum(x) + y / jnp.sum(y),
        lambda x, y: x * (jnp.sqrt(jnp.sum(x)) + jnp.sqrt(jnp.sum(y))),
        lambda x, y: x * jnp.sqrt(jnp.sum(x) + jnp.sum(y) + jnp.sum(x)),
        lambda x, y: x * jnp.maximum(jnp.sum(x), jnp.sum(y)),
        lambda x, y: x * jnp.sum(x * y),
        lambda x, y: x * (jnp.sum(x) + 1 + jnp.sum(y)),
        lambda x, y: (jnp.sum(x), y),
    ],
)
def test_what_mixes_elements_or_knows_their_place_has_none(fn):
    assert form(fn, (3, 3)) is None


def test_a_sum_over_the_only_array_is_not_known_to_be_one_over_all():
    x = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    program = jax.make_jaxpr(lambda x: x / jnp.sum(x))(x)
    assert pointwise_form(program, (0,)) is None


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x * (2.0 if x.ndim > 1 else 1.0),
        lambda x, y: x * x.shape[0],
        lambda x, y: x + (y if x.size > 9 else x),
        lambda x, y: x.astype(jnp.bfloat16 if x.ndim > 1 else jnp.float16),
        lambda x, y: x ** (2 if x.ndim > 1 else 3),
        jax.jit(lambda x, y: x * (2.0 if x.ndim > 1 else 1.0)),
    ],
)
def test_what_depends_on_a_shape_has_another_form_for_another(fn):
    assert form(fn, (3, 4)) is not None
    assert form(fn, (3, 4)) != form(fn, (4,))
