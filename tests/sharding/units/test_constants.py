"""Arrays that are in no Variable are constants of the model, wherever it is made."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from runs import POLICY, check_close, loss_fn
from zoo_layers import LAYERS, WIDTH, Residual, example

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
    pytest.mark.filterwarnings("ignore:loss_fn changes parameter"),  # as Flax's do
]

TX = optax.sgd(0.1)


class Table(Residual):
    """An array of NumPy, one of JAX, and one that Flax is told of."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = np.sin(np.arange(WIDTH, dtype=float))
        self.made = jnp.cos(jnp.arange(WIDTH, dtype=float))
        self.told = nnx.data({"a": jnp.arange(WIDTH), "b": [np.ones(WIDTH)]})

    def __call__(self, x):
        scale = self.told["a"] * self.told["b"][0] / WIDTH
        return super().__call__(x + self.table) * self.made + scale


class Normed(nnx.Module):
    """Flax's own weight normalization keeps arrays of its own."""

    def __init__(self, rngs):
        linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)
        self.norm = nnx.WeightNorm(linear, rngs=rngs, param_dtype=float)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(x))


class Model(nnx.Module):
    def __init__(self, layer: Any, rngs: nnx.Rngs, stacked: bool = True):
        self.first = layer(rngs)
        self.blocks = (
            jshard.Stack(layer, LAYERS, rngs=rngs)
            if stacked
            else nnx.List([layer(rngs) for _ in range(LAYERS)])
        )
        self.last = layer(rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in [self.blocks] if callable(self.blocks) else self.blocks:
            x = block(x)
        return self.last(x)


def plain(model: nnx.Module) -> Any:
    """Losses and gradient norms of two steps, with Flax alone."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.value_and_grad
    def loss(params):
        mean = loss_fn(nnx.merge(graphdef, params, rest, copy=True), example())
        return mean.total / mean.count

    @jax.jit
    def step(params):
        value, grads = loss(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (value, optax.tree.norm(grads)), params

    history = []
    for _ in range(2):
        metrics, params = step(params)
        history.append(metrics)
    return history


# Of models that exist, and of Flax's weight normalization, programs of tests/foreign.
@pytest.mark.slow  # foreign/test_programs.py has a table
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("devices", "accumulate"), [(4, 2), (2, 1), (1, 1), (8, 1)])
@pytest.mark.parametrize("start", ["init", "from"])
@pytest.mark.parametrize("layer", [Table, Normed], ids=lambda kind: kind.__name__)
def test_models_with_arrays_of_their_own_train_as_with_flax(
    layer, start, devices, accumulate, stacked
):
    make_model = lambda rngs: Model(layer, rngs, stacked)
    policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate)
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, policy, units=(layer,))
    model = make_model(nnx.Rngs(jax.random.key(0)))
    want = plain(model)
    state = fsdp.init(make_model, TX) if start == "init" else fsdp.from_model(model, TX)
    step, history = fsdp.train_step(loss_fn, TX), []
    batch = fsdp.shard_batch(np.asarray(example()))
    for _ in range(2):
        state, metrics = step(state, batch)
        history.append((metrics["loss"], metrics["grad_norm"]))
    check_close(history, want, 1e-9)
    means = fsdp.eval_step(loss_fn)(state, batch).compute()
    assert np.isfinite(means["loss"])


def test_they_are_in_checkpoints_and_in_models_made_of_a_state(tmp_path):
    make_model = lambda rngs: Model(Table, rngs)
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY, units=(Table,))
    state = fsdp.init(make_model, TX)  # that steps keep them is above
    x = np.asarray(example())
    saver = jshard.Checkpointer(tmp_path)
    saver.save(state)
    saver.wait()
    mesh = jshard.make_mesh(devices=jax.devices()[:3])
    other = jshard.FSDP(mesh, POLICY, units=(Table,))
    restored = saver.restore(other.abstract_state(make_model, TX))
    got, want = other.fetch(restored.model_arrays), fsdp.fetch(state.model_arrays)
    chex.assert_trees_all_equal(got, want)
    run = nnx.jit(lambda model: model(x))
    models = other.model(restored), fsdp.model(state)
    np.testing.assert_allclose(*map(run, models), rtol=1e-9, atol=1e-9)
