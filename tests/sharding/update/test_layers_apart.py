"""What of a Stack's layers is updated apart, as it is with all of them at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.sharding.layout.layer_dims import mark_layers
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.bf16_moments import Bf16MomentsState
from jshard.sharding.update.per_layer import PerLayerState, first_layer, stack_name

KEEP = optax.trace(0.0)  # whose moment is the gradient, which is then rounded
LAYERS = 3


def stacked(value: Any, *paths: str) -> nnx.Param:
    """A parameter with a layer dimension for each path in a layer."""
    variable = nnx.Param(jnp.asarray(value))
    mark_layers(variable, inner=[(path,) for path in paths])
    return variable


def params(seed: int = 0) -> nnx.State:
    """Two Stacks of equal depth, one in a Stack, and a parameter outside of them."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return nnx.State(
        {
            "a": {"w": stacked(draw(LAYERS, 4, 5), "w")},
            "b": {
                "w": stacked(draw(LAYERS, 4, 5), "w"),
                "v": stacked(draw(LAYERS, 5), "v"),
            },
            "deep": {"inner": {"w": deep(draw(2, LAYERS, 4, 5))}},
            "head": nnx.Param(jax.device_put(draw(4, 5))),
        }
    )


def deep(value: np.ndarray) -> nnx.Param:
    variable = nnx.Param(jnp.asarray(value))
    mark_layers(variable, inner=[("inner", "w"), ("w",)])
    return variable


def raw(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_that_is_updated_alone_is_rounded_with_its_own_bits(inside):
    tx = jshard.optim.bf16_moments(KEEP)
    tx = jshard.optim.per_layer(tx) if inside else tx
    # The same values in each layer, so that bits alone tell them apart.
    grads = nnx.State({"w": stacked(np.full((LAYERS, 64), 1.003, np.float32), "w")})
    update = jax.jit(lambda grads, state, first: updated(tx, grads, state, first))
    state = tx.init(grads)
    (want,) = [x for x in raw(update(grads, state, 0)) if x.shape == (LAYERS, 64)]
    assert not np.array_equal(want[0], want[1])
    cut = lambda tree, i: jax.tree.map(
        lambda x: np.asarray(x)[i : i + 1] if x.ndim and len(x) == LAYERS else x, tree
    )
    for layer in range(LAYERS):
        after = update(cut(grads, layer), cut(state, layer), layer)
        (got,) = [x for x in raw(after) if x.shape == (1, 64)]
        np.testing.assert_array_equal(got[0], want[layer])


def updated(tx: Any, grads: Any, state: Any, first: Any) -> Any:
    with within(first_layer, first):
        return tx.update(grads, state)[1]


def test_each_update_has_bits_of_its_own_and_counts():
    tx = jshard.optim.bf16_moments(KEEP)
    update = jax.jit(tx.update)
    grads = {"w": jnp.full(64, 1.003)}
    state: Any = tx.init(grads)
    assert isinstance(state, Bf16MomentsState)
    seen = []
    for step in range(3):
        assert int(state.step) == step
        _, state = update(grads, state)
        seen.append(raw(state.inner)[0])
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])


def lookout() -> optax.GradientTransformation:
    """Divides each tensor by its norm, and keeps the norms and a count."""
    norm = lambda x: jnp.sqrt(jnp.sum(x * x))

    def init(params: Any) -> Any:
        return {"seen": jax.tree.map(lambda x: x * 0, params), "n": jnp.int32(0)}

    def update(updates: Any, state: Any, params: Any = None, *, value: Any = 1) -> Any:
        divide = lambda g, p: value * g / norm(g) + norm(p)
        return jax.tree.map(divide, updates, params), {
            "seen": jax.tree.map(jnp.add, state["seen"], updates),
            "n": state["n"] + 1,
        }

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.core
def test_per_layer_is_the_optimizer_of_each_tensor():
    tx = jshard.optim.per_layer(lookout())
    weights, state = params(), tx.init(params())
    assert isinstance(state, PerLayerState)
    update = jax.jit(lambda *args: tx.update(*args, value=2.0))
    total = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), weights)
    for step in (1, 2):
        grads = params(step)
        got, state = update(grads, state, weights)
        total = jax.tree.map(lambda x, g: x + np.asarray(g), total, grads)
        flat = {path: x.get_value() for path, x in nnx.to_flat_state(grads)}
        of_weights = dict(nnx.to_flat_state(weights))
        for path, x in nnx.to_flat_state(got):
            depth = len(x.get_metadata("in_layer", ()))
            g, p = np.asarray(flat[path]), np.asarray(of_weights[path].get_value())
            axes = tuple(range(depth, g.ndim))
            norm = lambda x, axes=axes: np.sqrt(np.sum(x * x, axis=axes, keepdims=True))
            np.testing.assert_allclose(
                x.get_value(), 2 * g / norm(g) + norm(p), rtol=1e-5, atol=1e-6
            )
    assert sorted(state.stacked) == ["a", "b", "deep"]
    seen = lambda name: raw(state.stacked[name]["seen"])
    np.testing.assert_allclose(seen("a")[0], raw(total["a"])[0], rtol=1e-6)
    np.testing.assert_array_equal(state.stacked["b"]["n"], [2] * LAYERS)
    inner = state.stacked["deep"].stacked["deep.inner"]
    np.testing.assert_array_equal(inner["n"], np.full((2, LAYERS), 2))
    np.testing.assert_array_equal(state.rest["n"], 2)


def test_a_variable_has_the_name_of_its_stack_or_none():
    named = jax.tree_util.tree_leaves_with_path(
        params(), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    names = {jax.tree_util.keystr(path): stack_name(path, x) for path, x in named}
    assert names == {
        "['a']['w']": "a",
        "['b']['v']": "b",
        "['b']['w']": "b",
        "['deep']['inner']['w']": "deep",
        "['head']": None,
    }
    masked = nnx.Param(optax.MaskedNode())
    mark_layers(masked, inner=[("w",)])
    assert stack_name((jax.tree_util.DictKey("a"),), masked) is None
    assert stack_name((jax.tree_util.DictKey("w"),), stacked(np.ones((2, 2)), "w")) == (
        "model"
    )
