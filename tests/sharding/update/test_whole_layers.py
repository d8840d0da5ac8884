"""Functions on whole layers equal vmap, and move each matrix once and back."""

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
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.update.whole_layers import sharded_update, whole_layers
from jshard.system.errors import UserError

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


def stack(layers: int, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(layers)
    return rng.standard_normal((layers, *shape)), rng.standard_normal(layers)


def sharded(fn: Any, args: Any, mesh: Any, min_elements: int = 0) -> Any:
    dims = [d for d in (1, 2) if args[0].shape[d] % mesh.shape["fsdp"] == 0]
    spec = PartitionSpec(*[None] * dims[0], "fsdp") if dims else PartitionSpec()
    placed = jax.device_put(args[0], NamedSharding(mesh, spec)), args[1]
    policy = jshard.Policy(min_shard_elements=min_elements)

    def run(*args: Any) -> Any:
        with sharded_update(mesh, policy):
            return jax.vmap(whole_layers(fn))(*args)

    return jax.jit(run), placed


@pytest.mark.quick("products-9", "products-3-shape3", "loop")
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
        (products, 3, (8, 16), 8, 0),
    ],
)
def test_mapping_on_shards_equals_vmap(fn, layers, shape, replica, min_elements):
    args = stack(layers, shape)
    mesh = jshard.make_mesh(replica=replica)
    run, placed = sharded(fn, args, mesh, min_elements)
    want = jax.jit(jax.vmap(fn))(*args)
    chex.assert_trees_all_close(run(*placed), want, **BOUND)


@pytest.mark.usefixtures("x64")
def test_values_from_outside_may_be_used():
    args, outside = stack(3, (8, 16)), jnp.arange(16.0)
    mesh = jshard.make_mesh(replica=2)

    @jax.jit
    def run(outside, *args):
        with sharded_update(mesh, jshard.Policy()):
            return jax.vmap(whole_layers(lambda x, s: (x * outside) @ x.T * s))(*args)

    want = jax.jit(jax.vmap(lambda x, s: (x * outside) @ x.T * s))(*args)
    chex.assert_trees_all_close(run(outside, *args), want, **BOUND)


def inverted(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    inverse = lambda x: jnp.linalg.solve(x.T @ x + jnp.eye(len(x.T)), x.T).T
    return jax.tree.map(lambda x: inverse(x) if x.ndim == 2 else x, updates), state


# What nobody could look into, and what jshard could not replace.
UNMARKED = {
    "muon": optax.contrib.muon(1e-3),
    "every second": optax.MultiSteps(optax.contrib.muon(1e-3), 2),
    "finite": optax.apply_if_finite(optax.contrib.muon(1e-3), 3),
    "named": optax.named_chain(("muon", optax.contrib.muon(1e-3))),
    "own": optax.GradientTransformation(lambda params: (), inverted),
}


@pytest.mark.quick("muon", "finite", "own")
@pytest.mark.parametrize("name", UNMARKED)
def test_products_of_shards_in_per_layer_are_an_error_that_says_what_to_write(name):
    tx = UNMARKED[name]
    tx = optax.GradientTransformation(tx.init, tx.update)
    tx = jshard.optim.per_layer(tx)
    variable = nnx.Param(jax.ShapeDtypeStruct((3, 8, 16), jnp.float32))
    mark_layers(variable, inner=[("w",)])
    params = nnx.State({"a": {"w": variable}})
    state = jax.eval_shape(tx.init, params)

    def traced(mesh: Any, min_elements: int) -> Any:
        with sharded_update(mesh, jshard.Policy(min_shard_elements=min_elements)):
            jax.eval_shape(lambda *args: tx.update(*args), params, state, params)

    with pytest.raises(UserError, match=r"dot_general of .* jshard\.optim\.muon for"):
        traced(jshard.make_mesh(), 0)
    traced(jshard.make_mesh(fsdp=1, replica=8), 0)
    traced(jshard.make_mesh(), 1000)  # replicated


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("layers", "rounds"), [(8, 1), (9, 2)])
def test_each_matrix_goes_to_its_owner_and_back_and_nowhere_else(layers, rounds):
    matrix = lambda x, scale: products(x, scale)[0]
    run, placed = sharded(matrix, stack(layers, (8, 16)), jshard.make_mesh())
    found = hlo.collectives(run.lower(*placed).compile().as_text())
    assert {c.kind for c in found} == {"all-to-all"}
    assert sum(c.times for c in found) == 2 * rounds
    assert {sum(a.size for a in c.results) for c in found} == {8 * 16}


def test_what_no_device_has_a_part_of_stays_where_it_is():
    mesh = jshard.make_mesh(fsdp=1, replica=8)
    run, placed = sharded(lambda x, _: x, stack(8, (8, 16)), mesh)
    assert "shard_map" not in str(run.trace(*placed).jaxpr)


@pytest.mark.usefixtures("x64")
def test_layers_of_layers_are_layers():
    args = stack(8, (8, 16))
    deep = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), args)
    mesh = jshard.make_mesh()

    def run(*args: Any) -> Any:
        with sharded_update(mesh, jshard.Policy(min_shard_elements=0)):
            return jax.vmap(jax.vmap(whole_layers(products)))(*args)

    place = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
    placed = jax.device_put(deep[0], place), deep[1]
    want = jax.jit(jax.vmap(jax.vmap(products)))(*deep)
    compiled = jax.jit(run).lower(*placed).compile()
    chex.assert_trees_all_close(compiled(*placed), want, **BOUND)
    found = hlo.collectives(compiled.as_text() or "")
    moved = [c for c in found if c.kind == "all-to-all"]
    # One matrix in, and one back: all eight in one round.
    assert sum(c.times for c in moved) == 2
    assert {sum(a.size for a in c.results) for c in moved} == {8 * 16}


@pytest.mark.usefixtures("x64")
def test_outside_of_per_layer_it_is_the_function():
    x, scale = (a[0] for a in stack(1, (8, 16)))
    with sharded_update(jshard.make_mesh(), jshard.Policy()):
        got = whole_layers(loop)(x, scale)
    chex.assert_trees_all_close(got, loop(x, scale), **BOUND)
