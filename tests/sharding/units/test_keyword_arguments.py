"""Keyword arguments of Stacks: each layer gets them, in a step as outside of one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from zoo_layers import EXAMPLES, WIDTH, Dense, make_stack

pytestmark = pytest.mark.usefixtures("x64")


class Layer(Dense):
    def __call__(self, x, shift, *, mask=None, double=False):  # pyright: ignore
        out = super().__call__(x) + shift
        out = out if mask is None else jnp.where(mask, out, 0)
        return x + jnp.tanh(2 * out if double else out)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = make_stack(Layer, rngs)
        self.head = jshard.Unit(Dense(rngs))

    def __call__(self, batch):
        x = self.layers(batch["x"], batch["shift"], mask=batch["mask"], double=True)
        return self.head(x)


class During(Model):
    """Gathers its head during the last layer."""

    def __call__(self, batch):
        options = {"mask": batch["mask"], "double": True}
        layers = (self.layers, batch["x"], batch["shift"])
        head, x = jshard.gathered(self.head, during=layers, **options)
        return head(x)


def make_batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(EXAMPLES, WIDTH)),
        "shift": rng.normal(size=(EXAMPLES, WIDTH)),
        "mask": rng.integers(0, 2, (EXAMPLES, WIDTH)).astype(bool),
    }


def loop(params, batch):
    """The model as a plain function of its parameters."""
    x, (kernels, biases) = batch["x"], (params["layers"][k] for k in ("kernel", "bias"))
    for kernel, bias in zip(kernels, biases, strict=True):
        out = x @ kernel + bias + batch["shift"]
        x = x + jnp.tanh(2 * jnp.where(batch["mask"], out, 0))
    return x @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize(
    ("make_model", "prefetch"),
    [
        pytest.param(Model, False, marks=pytest.mark.slow),
        pytest.param(Model, True, marks=pytest.mark.slow),
        pytest.param(During, False, marks=pytest.mark.slow),
        (During, True),
    ],
)
def test_a_step_with_keyword_arguments_is_that_of_one_device(make_model, prefetch):
    policy = jshard.Policy(prefetch=prefetch, min_shard_elements=1)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    tx, batch = optax.sgd(0.1), make_batch()
    outside = filled(lambda: make_model(nnx.Rngs(0)))
    state = fsdp.from_model(outside, tx)
    params = nnx.to_pure_dict(fsdp.fetch(state.params))

    def loss_fn(model, batch):
        return jshard.Mean(jnp.sum(model(batch) ** 2), EXAMPLES // 8)

    def loss(params):
        return jnp.sum(loop(params, batch) ** 2) / EXAMPLES

    value, grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(params))
    of_model = nnx.jit(lambda model: jnp.sum(model(batch) ** 2) / EXAMPLES)
    assert abs(of_model(outside).item() - value) < 1e-9
    state, metrics = fsdp.train_step(loss_fn, tx)(state, fsdp.shard_batch(batch))
    assert abs(metrics["loss"].item() - value) < 1e-9
    want = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    got = nnx.to_pure_dict(fsdp.fetch(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), got, want)
