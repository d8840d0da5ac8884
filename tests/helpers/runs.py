"""Runs a model on a hybrid mesh, and as an ordinary module without one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
from filled import filled
from zoo_layers import example, make_stack

POLICY = jshard.Policy(min_shard_elements=0)
RATE = 0.01  # with 0.1, some models of values by NumPy diverge


def check_close(got: Any, want: Any, bound: float = 1e-12) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=0, atol=bound * (np.abs(w).max() + 1e-9))


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(jnp.sin(model(x)) ** 2), x.shape[0])


def run(
    model: Any, policy: jshard.Policy = POLICY, units: tuple = ()
) -> tuple[Any, Any, Any]:
    """(metrics, parameters, model state) after two steps on a hybrid mesh."""
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy, units=units)
    tx = optax.sgd(RATE)
    state = fsdp.from_model(filled(lambda: model(nnx.Rngs(0))), tx)
    step = fsdp.train_step(loss_fn, tx)
    history = []
    for _ in range(2):
        state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
        history.append((metrics["loss"], metrics["grad_norm"]))
    return history, *fsdp.fetch((state.params, state.model_state))


@functools.cache
def plain_run(model: Any) -> tuple[Any, Any, Any]:
    """The same with the model as an ordinary module, by jax.grad."""
    module = filled(lambda: model(nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest):
        module = nnx.merge(graphdef, params, rest, copy=True)
        mean = loss_fn(module, example())
        return mean.total / mean.count, nnx.state(module, nnx.Not(nnx.Param))

    @jax.jit
    def step(params, rest):
        (value, rest), grads = loss(params, rest)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        return (value, optax.tree.norm(grads)), params, rest

    history = []
    for _ in range(2):
        metrics, params, rest = step(params, rest)
        history.append(metrics)
    return history, params, rest


def check_run(model: Any, policy: jshard.Policy = POLICY, bound: float = 1e-9) -> None:
    compare(run(model, policy), plain_run(model), bound)


def compare(got: Any, want: Any, bound: float = 1e-9) -> None:
    """Checks that two runs went the same way; random keys are not compared."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(g, w, rtol=0, atol=bound * np.abs(w).max())


def call(model: Any, *, inside: bool) -> Any:
    """Runs a model once, inside a mesh or outside of one."""
    return run(model) if inside else filled(lambda: model(nnx.Rngs(0)))(example())


@functools.cache
def everywhere(layer: Any) -> type:
    """A model that has ``layer`` in the root, as a Unit, and in a Stack."""

    class Everywhere(nnx.Module):
        def __init__(self, rngs):
            self.root, self.unit = layer(rngs), jshard.Unit(layer(rngs))
            self.blocks = make_stack(layer, rngs)

        def __call__(self, x):
            return self.blocks(self.unit(self.root(x)))

    return Everywhere


@functools.cache
def as_unit(layer: Any) -> type:
    class AsUnit(nnx.Module):
        def __init__(self, rngs):
            self.unit = jshard.Unit(layer(rngs))

        def __call__(self, x):
            return self.unit(x)

    return AsUnit
