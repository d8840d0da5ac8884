"""Optimizers that take more than gradients: ``value=`` is the step's loss."""

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

EXAMPLES, WIDTH, STEPS = 16, 8, 6


class Model(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(
            WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs
        )
        self.layers = jshard.Stack(layer, 3, rngs=rngs)

    def __call__(self, x):
        return self.layers(x)


def loss_fn(model, x):
    return jshard.Mean(jnp.sum(model(x) ** 2), len(x))


def batches():
    # The loss grows, so that a plateau is found.
    rng = np.random.default_rng(0)
    return [(i + 1) * rng.normal(size=(EXAMPLES, WIDTH)) for i in range(STEPS)]


def plateau():
    # An accumulation of two steps takes the mean of two losses.
    return optax.contrib.reduce_on_plateau(patience=1, cooldown=0, accumulation_size=2)


OPTIMIZERS = {
    "plateau": lambda: optax.chain(optax.adam(1e-2), plateau()),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "per-layer": lambda: optax.chain(
        jshard.optim.per_layer(optax.lamb(1e-2)), plateau()
    ),
}


@pytest.mark.quick("plateau-True")
@pytest.mark.parametrize(
    ("name", "scaled", "offload"),
    [
        ("plateau", False, None),
        ("plateau", True, None),
        ("plateau", False, "optimizer"),
        ("polyak", False, None),
        ("per-layer", False, "all"),
    ],
)
def test_value_is_the_loss_of_the_global_batch(name, scaled, offload):
    policy = jshard.Policy(
        min_shard_elements=1, accumulate=2, loss_scale=scaled, offload=offload
    )
    fsdp = jshard.FSDP(jshard.make_mesh(), policy)
    tx = OPTIMIZERS[name]()
    model = filled(lambda: Model(nnx.Rngs(0)))
    state = fsdp.from_model(model, tx)
    graphdef, params = nnx.split(model)
    step, opt_state = fsdp.train_step(loss_fn, tx), tx.init(params)
    update = make_update(tx)

    @jax.jit
    @jax.value_and_grad
    def loss(params, x):
        return jnp.sum(nnx.merge(graphdef, params)(x) ** 2) / EXAMPLES

    for x in batches():
        value, grads = loss(params, x)
        params, opt_state = update(grads, opt_state, params, value=value)
        state, metrics = step(state, fsdp.shard_batch(x))
        assert abs(metrics["loss"] / value - 1) < 1e-9
    for got, want in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-6, 1e-9)
    if name == "plateau":
        assert state.opt_state[1].scale < 1, "the plateau was never found"


def test_an_optimizer_that_needs_what_a_step_does_not_have_is_one_clear_line():
    tx = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    )
    fsdp = jshard.FSDP(jshard.make_mesh())
    with pytest.raises(jshard.UserError, match=r"value_fn.*no line search") as error:
        fsdp.abstract_state(Model, tx)
    assert "\n" not in str(error.value)


def test_what_takes_other_arguments_than_value_is_not_given_it():
    normal = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam = optax.contrib.sam(optax.sgd(0.1, momentum=0.9), normal, sync_period=2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), sam)  # hands on what it is given
    linear = lambda: nnx.Linear(6, 6, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    policy = jshard.Policy(min_shard_elements=1)
    fsdp = jshard.FSDP(jshard.make_mesh(), policy, units=(nnx.Linear,))
    model = filled(lambda: nnx.Sequential(linear()))
    state = fsdp.from_model(model, tx)
    step, update = fsdp.train_step(loss_fn, tx), make_update(tx)
    graphdef, params = nnx.split(model)
    x, opt_state = np.random.default_rng(0).normal(size=(EXAMPLES, 6)), tx.init(params)

    @jax.jit
    @jax.grad
    def gradients(params):
        return jnp.sum(nnx.merge(graphdef, params)(x) ** 2) / EXAMPLES

    for _ in range(3):
        params, opt_state = update(gradients(params), opt_state, params)
        state, _ = step(state, fsdp.shard_batch(x))
    for got, want in zip(
        jax.tree.leaves(fsdp.fetch(state.params)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(got, want, 1e-9)
