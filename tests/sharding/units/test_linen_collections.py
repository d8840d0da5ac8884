"""What a call of a Linen unit leaves: what it sows, other collections, arguments."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jshard
from filled import filled
from runs import POLICY
from zoo_layers import WIDTH, example

SCAN: Any = linen.scan
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]


class Sows(linen.Module):
    """Sows, counts in a collection of its own, and writes into an argument."""

    @linen.compact
    def __call__(self, x, aux):
        y = jnp.tanh(linen.Dense(WIDTH, param_dtype=float)(x))
        self.sow("intermediates", "penalty", jnp.mean(y**2, -1))
        if self.is_mutable_collection("cache") and not self.is_initializing():
            calls = self.variable("cache", "calls", lambda: jnp.zeros(()))
            calls.value += 1
            y = y * calls.value
        aux["penalty"] += jnp.mean(y**4, -1)
        return y


class Scanned(Sows):
    @linen.compact
    def __call__(self, x, aux):
        return Sows()(x, {"penalty": jnp.zeros(len(x))}), None


class Layers(linen.Module):
    """One layer twice, another one, and two in a loop."""

    def setup(self):
        self.first, self.second = Sows(), Sows()
        axes = {"params": 0, "intermediates": 0, "cache": 0}
        self.loop = SCAN(
            linen.remat(Scanned),
            variable_axes=axes,
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=2,
        )()

    def __call__(self, x, aux):
        x = self.first(self.first(self.second(x, aux), aux), aux)
        return self.loop(x, aux)[0]


def losses(apply: Any, x: jax.Array, **options: Any) -> jax.Array:
    aux = {"penalty": jnp.zeros(len(x))}
    y, state = apply(x, aux, **options)
    of_state = lambda path, x: (
        jnp.sum(x) / (1 if path[-1] == jax.tree_util.DictKey("calls") else number)
    )
    number = len(x)
    sown = jax.tree.leaves(jax.tree.map_with_path(of_state, state))
    return jnp.mean((y - 1) ** 2, -1) + aux["penalty"] + sum(sown)


OPTIONS = {
    "named": {"mutable": ["intermediates", "cache"]},
    "all but": {"mutable": linen.DenyList(["params", "cache"])},
    "captured": {
        "capture_intermediates": lambda module, _: isinstance(module, linen.Dense)
    },
}


def found(options: Any, *, trains: bool) -> tuple[Any, Any]:
    """The loss, and the norm of its gradient, of jshard and of Linen."""
    aux = {"penalty": jnp.zeros(1)}
    make = lambda rngs: jshard.linen.Model(
        Layers(), jnp.ones((1, WIDTH)), aux, units=(Sows,), rngs=rngs
    )
    mesh = jshard.make_mesh(devices=jax.devices()[:2])
    fsdp, sgd = jshard.FSDP(mesh, POLICY), optax.sgd(0.1)
    model = filled(lambda: make(nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state, x = fsdp.from_model(model, sgd), fsdp.shard_batch(np.asarray(example()))

    def loss(model, x):
        return jshard.Mean(jnp.sum(losses(model, x, **options)), len(x))

    def plain(params):
        apply = lambda *args, **options: Layers().apply(params, *args, **options)
        return jnp.mean(losses(apply, example(), **options))

    if not trains:
        return fsdp.eval_step(loss)(state, x).compute()["loss"], jax.jit(plain)(params)
    want, grads = jax.jit(jax.value_and_grad(plain))(params)
    _, metrics = fsdp.train_step(loss, sgd)(state, x)
    got = metrics["loss"], metrics["grad_norm"]
    return got, (want, optax.tree.norm(grads))


def test_what_linen_units_leave_is_there_after_the_call():
    got, want = found(OPTIONS["named"], trains=False)
    np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_linen_units_leave_has_gradients(options):
    got, want = found(options, trains=True)
    np.testing.assert_allclose(got, want, rtol=1e-9)
