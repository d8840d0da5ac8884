"""Stacks of equal depth, an encoder and a decoder say, are updated apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity

WIDTH, LAYERS = 8, 3


class Layer(nnx.Module):
    def __init__(self, scale: float):
        grid = jnp.arange(WIDTH * 16.0).reshape(WIDTH, 16)
        self.matrix = nnx.Param(scale * jnp.sin(grid))
        self.vector = nnx.Param(scale * jnp.linspace(-1, 1, WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return apply({"matrix": self.matrix[...], "vector": self.vector[...]}, x)


def apply(layer: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ layer["matrix"]) @ layer["matrix"].T * layer["vector"]


class Deep(nnx.Module):
    """A layer that holds a Stack."""

    def __init__(self, scale: float, rngs: nnx.Rngs):
        self.inner = jshard.Stack(lambda rngs: Layer(scale), 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


class Half(nnx.Module):
    """A module that a Stack is found in, under the same name in both."""

    def __init__(self, scale: float, rngs: nnx.Rngs):
        self.layers = jshard.Stack(lambda rngs: Layer(scale), LAYERS, rngs=rngs)


class Model(nnx.Module):
    """An encoder, a decoder, a Stack of Stacks as deep, and a Unit."""

    def __init__(self, rngs: nnx.Rngs):
        self.encoder = Half(1.0, rngs)
        self.decoder = Half(0.01, rngs)  # of gradients that are far larger
        self.deep = jshard.Stack(lambda rngs: Deep(0.1, rngs), LAYERS, rngs=rngs)
        self.head = jshard.Unit(Layer(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.decoder.layers(self.encoder.layers(x))
        return self.head(self.deep(x))


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.shape[0])


def batches() -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(size=(16, WIDTH)) for i in range(3)]


def layers_of(state: nnx.State) -> dict[tuple, dict[str, jax.Array]]:
    """Each layer of each Stack, and the Unit, by its place."""
    found: dict[tuple, dict[str, Any]] = {}
    for path, variable in nnx.to_flat_state(state):
        stack, name, value = path[:-1], str(path[-1]), np.asarray(variable.get_value())
        for index in np.ndindex(*value.shape[: value.ndim - (name == "matrix") - 1]):
            found.setdefault((*stack, *index), {})[name] = jnp.asarray(value[index])
    return found


def reference(params: nnx.State, tx: Any) -> dict[tuple, Any]:
    """Trains one layer after another on one device, each with an optimizer."""
    layers = layers_of(params)
    order = [key for key in layers if key[0] == "encoder"]
    order += [key for key in layers if key[0] == "decoder"]
    order += sorted(key for key in layers if key[0] == "deep")
    order += [("head",)]
    assert len(order) == len(layers) == 2 * LAYERS + 2 * LAYERS + 1

    def loss(layers: dict, x: jax.Array) -> jax.Array:
        rows = len(x)
        for key in order:
            x = apply(layers[key], x)
        return jnp.sum(x**2) / rows

    gradients, update = jax.jit(jax.grad(loss)), parity.make_update(tx)
    states = {key: tx.init(layer) for key, layer in layers.items()}
    for x in batches():
        grads = gradients(layers, x)
        for key in layers:
            layers[key], states[key] = update(grads[key], states[key], layers[key])
    return layers


def flat(layers: dict[tuple, Any]) -> dict[str, Any]:
    return {
        f"{key}{name}": x for key, layer in layers.items() for name, x in layer.items()
    }


# What looks at all parameters that it is given.
ACROSS = {
    "adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "muon": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.contrib.muon(1e-2)
    ),
}

OURS = ACROSS | {
    "muon": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), jshard.optim.muon(1e-2)
    ),
}


# By default test_layers_apart.py has per_layer of equal Stacks and of nested ones.
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "replica", "offload"),
    [("adam", 2, None), ("muon", 1, None), ("adam", 1, "optimizer")],
)
def test_layers_of_equal_stacks_train_as_if_each_had_an_optimizer_of_its_own(
    name, replica, offload
):
    policy = jshard.Policy(min_shard_elements=0, offload=offload)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=replica), policy)
    tx = jshard.optim.per_layer(OURS[name]())
    state = fsdp.init(Model, tx)
    want = reference(state.params, ACROSS[name]())
    step = fsdp.train_step(loss_fn, tx)
    for x in batches():
        state, _ = step(state, fsdp.shard_batch(x))
    assert parity.worst(flat(layers_of(state.params)), flat(want)) <= 1e-9


def test_the_state_of_a_stack_is_found_by_its_path_in_the_model():
    tx = jshard.optim.per_layer(optax.adam(1e-2))
    state = jax.eval_shape(tx.init, nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    stacked = state.stacked  # pyright: ignore[reportAttributeAccessIssue]
    assert set(stacked) == {"encoder.layers", "decoder.layers", "deep"}
    assert set(stacked["deep"].stacked) == {"deep.inner"}


class Root(nnx.Module):
    """Its Stack's matrix has another name, which comes before the Stack's."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = jshard.Stack(lambda rngs: Layer(1.0), LAYERS, rngs=rngs)
        self.alias = self.stack.matrix


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: jshard.Stack(lambda rngs: Layer(1.0), 2, rngs=nnx.Rngs(0)), ["model"]),
        (lambda: Root(nnx.Rngs(0)), ["alias", "stack"]),
    ],
)
def test_stacks_that_are_the_model_and_aliases_of_weights_have_states(make, names):
    params = nnx.state(make(), nnx.Param)
    tx = jshard.optim.per_layer(optax.lamb(1e-2))
    state: Any = jax.eval_shape(tx.init, params)
    assert sorted(state.stacked) == names
    _, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
