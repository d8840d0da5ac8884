"""What ``wrt`` selects is trained, whatever its type; the rest is frozen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.plan.start_up import describe
from parity import make_update
from runs import check_close, loss_fn
from zoo_layers import WIDTH, Dense, example, make_stack

pytestmark = pytest.mark.usefixtures("x64")

TX = optax.adam(1e-2)


class Own(nnx.Variable):
    """No nnx.Param."""


class Kept(nnx.Param):
    """An nnx.Param."""


class Layer(Dense):
    """A unit in a unit, a statistic, and parameters of three types."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.scale = Own(jnp.full(WIDTH, 0.5))
        self.shift = Kept(jnp.zeros(WIDTH))
        self.inner = Inner(rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        h = self.inner(super().__call__(x))
        return x + jnp.tanh(h * self.scale + self.shift)


class Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.matrix = Own(rngs.uniform((WIDTH, WIDTH), dtype=float) - 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix[...]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(rngs)])
        self.stack = make_stack(Layer, rngs)
        self.last = Own(rngs.uniform((WIDTH, WIDTH), dtype=float))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.stack(x) @ self.last[...]


def make_fsdp(**policy: Any) -> jshard.FSDP:
    policy = {"min_shard_elements": 0} | policy
    mesh = jshard.make_mesh(replica=2)
    return jshard.FSDP(mesh, jshard.Policy(**policy), units=(Layer, Inner))


SELECTIONS = {
    "a Variable type": Own,
    "a Param subclass": Kept,
    "both and all Params": (Own, nnx.Param),
    "by path": nnx.All(Own, nnx.PathContains("inner")),
}


@pytest.mark.slow  # test_existing_model.py trains what wrt selects
@pytest.mark.parametrize("wrt", SELECTIONS.values(), ids=SELECTIONS)
def test_what_wrt_selects_trains_as_on_one_device(wrt):
    model = filled(lambda: Model(nnx.Rngs(0)), kinds=(nnx.Param, Own))
    fsdp = make_fsdp()
    state = fsdp.from_model(model, TX, wrt=wrt)
    graphdef, params, rest = nnx.split(model, wrt, ...)
    update, opt_state = make_update(TX), jax.jit(TX.init)(params)

    @jax.jit
    def run(params, rest):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = loss_fn(model, example()).compute()
            return value, nnx.state(model, nnx.Not(wrt))

        return jax.value_and_grad(loss, has_aux=True)(params)

    step = fsdp.train_step(loss_fn, TX)
    for _ in range(3):
        state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
        (value, rest), grads = run(params, rest)
        params, opt_state = update(grads, opt_state, params)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    check_close(leaves(state.params), leaves(params), 1e-9)
    others = nnx.state(fsdp.model(state), nnx.Not(wrt))
    check_close(leaves(others), leaves(rest), 1e-9)


@pytest.mark.core
def test_it_is_sharded_and_so_are_parameters_that_stay():
    state = make_fsdp().abstract_state(Model, TX, wrt=Own)
    for tree in (state.params, state.frozen, state.opt_state[0].mu):
        assert tree
        assert all("fsdp" in x.sharding.spec for x in jax.tree.leaves(tree))
    assert {type(v) for _, v in nnx.to_flat_state(state.params)} == {Own}
    # Nothing else has gradients, and a place in the optimizer's state.
    trained = {path for path, _ in nnx.to_flat_state(state.params)}
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        assert {path for path, _ in nnx.to_flat_state(moments)} == trained
    assert not trained & {path for path, _ in nnx.to_flat_state(state.frozen)}


def test_its_weights_are_gathered_in_their_units_and_follow_the_policy():
    fsdp = make_fsdp(precision=jshard.Precision(param="float32"))
    state = fsdp.abstract_state(Model, TX, wrt=Own)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    step = fsdp.train_step(loss_fn, TX)
    text = describe(fsdp, state, np.asarray(example()), step)
    (root,) = [line for line in text.splitlines() if line.startswith("root")]
    assert root.endswith(": last")


@pytest.mark.parametrize(
    ("wrt", "message"),
    [
        (nnx.BatchStat, r"'layers\.0\.calls', a BatchStat"),
        (Own, r"'layers\.0\.scale' of int"),
        (lambda path, _: path[-1] == "table", r"'layers\.0\.table', a plain array"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(wrt, message):
    class Counting(Model):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers[0].scale = Own(jnp.arange(WIDTH))
            vars(self.layers[0])["table"] = jnp.ones((WIDTH, WIDTH))

    with pytest.raises(jshard.UserError, match=message) as error:
        make_fsdp().abstract_state(Counting, TX, wrt=wrt)
    assert "\n" not in str(error.value)


def test_names_that_no_checkpoint_tells_apart_are_refused_at_init():
    def make(names: dict[str, Any], rngs: nnx.Rngs) -> nnx.Module:
        model: Any = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs))
        model.all = nnx.Dict({name: value() for name, value in names.items()})
        return model

    one = lambda: nnx.Param(jnp.ones(3))
    nested = lambda: nnx.Dict(b=one(), c=one())
    fsdp, tx = jshard.FSDP(jshard.make_mesh()), optax.sgd(1.0)
    for names in ({"a.b": one, "a": nested}, {"a.b.d": one, "a": nested}):
        with pytest.raises(jshard.UserError, match=r"'params.all.a.b' and 'params.all"):
            fsdp.init(functools.partial(make, names), tx)
    fsdp.abstract_state(functools.partial(make, {"a.d": one, "a": nested}), tx)
