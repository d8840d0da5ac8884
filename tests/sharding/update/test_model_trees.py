"""Optimizers with trees of the user's model, and with lists for a parameter's state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_update

pytestmark = pytest.mark.usefixtures("x64")

EXAMPLES, WIDTH = 12, 7  # of no mesh here a multiple


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        linear = lambda: nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.embed = nnx.Embed(9, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.head = linear()

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.embed(ids)))


IDS = np.arange(EXAMPLES) % 9


def loss_fn(model: Any, ids: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum((model(ids) - 1) ** 2), len(ids))


def chosen(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in str(path), params
    )


def optimizer(tree: Any) -> optax.GradientTransformation:
    """Each of what takes a tree, of booleans or of labels, and lists as state."""
    labels = jax.tree.map(lambda yes: "a" if yes else "b", tree)
    both = {"a": optax.scale_by_adam(), "b": optax.trace(0.9)}
    return optax.chain(
        optax.add_decayed_weights(0.1, mask=tree),
        optax.sm3(1.0),
        optax.multi_transform(both, labels),
        optax.scale(-1e-2),
    )


@pytest.mark.slow  # test_every_optimizer.py has a list
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("kind", ["variables", "pure"])
def test_trees_of_the_model_and_lists_as_state_train_as_on_one_device(kind, devices):
    model = filled(lambda: Model(nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    tx = optimizer(chosen(params if kind == "variables" else nnx.as_pure(params)))
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    policy = jshard.Policy(min_shard_elements=1)
    fsdp = jshard.FSDP(mesh, policy, units=(nnx.Embed, nnx.Linear))
    state = fsdp.from_model(model, tx)
    step, update, opt_state = (
        fsdp.train_step(loss_fn, tx),
        make_update(tx),
        tx.init(params),
    )

    @jax.jit
    @jax.grad
    def gradients(params: Any) -> jax.Array:
        return jnp.sum((nnx.merge(graphdef, params)(IDS) - 1) ** 2) / EXAMPLES

    for _ in range(2):
        params, opt_state = update(gradients(params), opt_state, params)
        state, _ = step(state, fsdp.shard_batch(np.resize(IDS, 24)))
    got = jax.tree.leaves(fsdp.fetch((state.params, state.opt_state)))
    for x, y in zip(got, jax.tree.leaves((params, opt_state)), strict=True):
        np.testing.assert_allclose(x, y, 1e-9, 1e-12)


def test_a_tree_of_another_kind_is_one_line_with_what_to_write():
    mask = chosen(nnx.to_pure_dict(nnx.state(filled(lambda: Model(nnx.Rngs(0))))))
    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(
        jshard.UserError, match=r"types at key path .*nnx\.as_p"
    ) as error:
        fsdp.abstract_state(Model, optax.adamw(1e-3, mask=mask))
    assert "\n" not in str(error.value)
