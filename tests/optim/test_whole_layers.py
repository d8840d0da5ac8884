"""Mapping over layers on shards equals vmap, and multiplies matrices as wholes."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import hlo
import jshard
from jshard.optim.per_layer import sharded_update
from jshard.optim.whole_layers import map_whole_layers

BOUND = {"rtol": 1e-12, "atol": 1e-12}


def products(x: Any, scale: Any) -> Any:
    """Elementwise work before, between and after products, and a transpose."""
    x = x / jnp.linalg.norm(x)
    for _ in range(2):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return jnp.tanh(x.T) * scale, scale + 1, scale, 2.0


def loop(x: Any, scale: Any) -> Any:
    y = jax.lax.fori_loop(0, 3, lambda _, y: y @ x.T @ x * 1e-2, x)
    return {"y": y - x, "sum": jnp.sum(y) * scale}


def decomposition(x: Any, scale: Any) -> Any:
    q, r = jnp.linalg.qr(x.T)
    return q * scale, jnp.abs(r)


@jax.jit
def jitted(x: Any, scale: Any) -> Any:
    return jnp.where(scale > 0, x @ x.T @ x, x)


def elementwise(x: Any, scale: Any) -> Any:
    return x * scale, jnp.mean(x, axis=0)


def stack(layers: int, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(layers)
    return rng.standard_normal((layers, *shape)), rng.standard_normal(layers)


def sharded(fn: Any, args: Any, mesh: Any, min_elements: int = 0) -> Any:
    dims = [d for d in (1, 2) if args[0].shape[d] % mesh.shape["fsdp"] == 0]
    spec = PartitionSpec(*[None] * dims[0], "fsdp") if dims else PartitionSpec()
    placed = jax.device_put(args[0], NamedSharding(mesh, spec)), args[1]
    return jax.jit(lambda *args: map_whole_layers(fn, args, mesh, min_elements)), placed


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("fn", "layers", "shape", "replica", "min_elements"),
    [
        (products, 8, (8, 16), 1, 0),
        (products, 3, (8, 16), 2, 0),
        (products, 9, (16, 12), 2, 0),
        (products, 3, (5, 7), 1, 0),  # no dimension divides
        (products, 3, (8, 16), 1, 1000),  # small, and so replicated
        (loop, 5, (8, 16), 1, 0),
        (decomposition, 8, (8, 16), 2, 0),
        (jitted, 9, (16, 8), 1, 0),
        (elementwise, 3, (8, 16), 1, 0),
        (products, 3, (8, 16), 8, 0),
    ],
)
def test_mapping_on_shards_equals_vmap(fn, layers, shape, replica, min_elements):
    args = stack(layers, shape)
    mesh = jshard.make_mesh(replica=replica)
    run, placed = sharded(fn, args, mesh, min_elements)
    chex.assert_trees_all_close(run(*placed), jax.vmap(fn)(*args), **BOUND)


@pytest.mark.usefixtures("x64")
def test_values_from_outside_may_be_used():
    args, outside = stack(3, (8, 16)), jnp.arange(16.0)
    mesh = jshard.make_mesh(replica=2)

    @jax.jit
    def run(outside, *args):
        return map_whole_layers(lambda x, s: (x * outside) @ x.T * s, args, mesh, 0)

    want = jax.vmap(lambda x, s: (x * outside) @ x.T * s)(*args)
    chex.assert_trees_all_close(run(outside, *args), want, **BOUND)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("layers", "rounds"), [(8, 1), (9, 2)])
def test_each_matrix_goes_to_its_owner_and_back_and_nowhere_else(layers, rounds):
    run, placed = sharded(products, stack(layers, (8, 16)), jshard.make_mesh())
    found = hlo.collectives(run.lower(*placed).compile().as_text())
    assert {c.kind for c in found} <= {"all-to-all", "all-gather"}  # of scalars
    moved = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.times for c in moved) == 2 * rounds
    assert {sum(a.size for a in c.results) for c in moved} == {8 * 16}
    scalars = [a.size for c in found if c not in moved for a in c.results]
    assert all(size <= 8 * rounds for size in scalars)


def scaled(x: Any) -> optax.GradientTransformation:
    """A user's own, of which nothing is known."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: g * x, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    ("tx", "whole", "kinds"),
    [
        (optax.lamb(1e-2), None, {"all-reduce"}),  # the norms
        (
            optax.chain(optax.adam(1e-2), optax.adaptive_grad_clip(0.1)),
            None,
            {"all-reduce"},
        ),
        (optax.adamw(1e-2), None, set()),
        (optax.adamw(1e-2), True, {"all-to-all", "all-gather"}),
        (scaled(2.0), None, {"all-to-all"}),
        (scaled(2.0), False, set()),
    ],
)
def test_what_is_known_not_to_need_complete_layers_stays_on_shards(tx, whole, kinds):
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.matrix = nnx.Param(rngs.normal((8, 16)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = jshard.Stack(Layer, 9, rngs=rngs)

    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    tx = jshard.optim.per_layer(tx, whole=whole)
    state = fsdp.abstract_state(Model, tx)

    @jax.jit
    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        with sharded_update(fsdp.mesh, fsdp.policy):
            return tx.update(grads, opt_state, params)

    lowered = update.lower(state.params, state.opt_state, state.params)
    found = hlo.collectives(lowered.compile().as_text() or "")
    assert {c.kind for c in found} == kinds
    moved = [c for c in found if c.kind == "all-to-all"]
    assert all(sum(a.size for a in c.results) == 8 * 16 for c in moved)
