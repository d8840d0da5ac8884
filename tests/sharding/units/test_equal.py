"""What must be equal on all devices is proved so by reading the step, or refused."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jshard
from filled import filled
from runs import POLICY, check_run, loss_fn, run
from zoo_layers import Counting, Dense, Residual, example, make_stack

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

TX = optax.sgd(0.1)


# Branches and loops with collectives inside.


class Branch(nnx.Module):
    """Chooses between two units by a condition."""

    def __init__(self, condition: Any, rngs: nnx.Rngs):
        self.condition = condition
        self.first, self.second = (jshard.Unit(Residual(rngs)) for _ in range(2))

    def __call__(self, x):
        return lax.cond(self.condition(x), self.first, self.second, x)


class Depth(nnx.Module):
    """Repeats a unit as often as a condition says."""

    def __init__(self, condition: Any, rngs: nnx.Rngs):
        self.condition = condition
        self.unit = jshard.Unit(Residual(rngs))

    def __call__(self, x):
        goes_on = lambda state: (state[0] < 3) & self.condition(state[1])
        return lax.while_loop(goes_on, lambda s: (s[0] + 1, self.unit(s[1])), (0, x))[1]


class Drop(Branch):
    """Leaves a whole Stack out."""

    def __init__(self, condition: Any, rngs: nnx.Rngs):
        self.condition = condition
        self.blocks = make_stack(Residual, rngs)

    def __call__(self, x):
        return lax.cond(self.condition(x), self.blocks, lambda x: x, x)


class Talks(Branch):
    """Has a collective of its own in a branch."""

    def __call__(self, x):
        mean = lambda x: jshard.pmean(jnp.mean(x))
        return x * lax.cond(self.condition(x), mean, lambda x: 0.5, x)


def own(x):
    return x[0, 0] > 0


def shared(x):
    return jshard.pmean(jnp.sum(x)) > -1e9


def by_replica(x):
    return lax.pmean(jnp.sum(x), "fsdp") > 0


REFUSED = [
    (Branch, r"test_equal.py:\d+ .*calls 'first'|calls 'second'"),
    (Depth, "calls 'unit', which gathers 'unit."),
    (Drop, "calls 'blocks', which gathers 'blocks."),
    (Talks, "has collectives inside, and its condition may differ by device"),
]


def eval_step(model):
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), POLICY)
    state = fsdp.from_model(filled(lambda: model(nnx.Rngs(0))), TX)
    batch = fsdp.shard_batch(np.asarray(example()))
    fsdp.eval_step(loss_fn)(state, batch)


def predict_step(model):
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), POLICY)
    state = fsdp.from_model(filled(lambda: model(nnx.Rngs(0))), TX)
    batch = fsdp.shard_examples(np.asarray(example()))
    fsdp.predict_step(lambda model, x: model(x))(state, batch)


CASES = [
    pytest.param(
        step,
        condition,
        kind,
        message,
        id="-".join(names),
        marks=pytest.mark.core if names == ["run", "by_replica", "Drop"] else (),
    )
    for kind, message in REFUSED
    for step in (run, eval_step, predict_step)
    for condition in (own, by_replica)
    if (names := [step.__name__, condition.__name__, kind.__name__])
]


@pytest.mark.quick(
    "run-own-Branch",
    "run-by_replica-Drop",
    "eval_step-own-Depth",
    "predict_step-own-Talks",
)
@pytest.mark.parametrize(("step", "condition", "kind", "message"), CASES)
def test_collectives_under_a_condition_of_one_device_are_refused(
    step, condition, kind, message
):
    with pytest.raises(jshard.UserError, match=message) as error:
        step(functools.partial(kind, condition))
    assert "\n" not in str(error.value)


@pytest.mark.quick("Branch")
@pytest.mark.parametrize("kind", [Branch, Drop, Talks], ids=lambda kind: kind.__name__)
def test_under_a_condition_that_is_equal_everywhere_they_train_exactly(kind):
    check_run(functools.partial(kind, shared))


@pytest.mark.slow  # test_foreign_layers.py has loops
def test_a_loop_of_equal_turns_evaluates_exactly():
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), POLICY)
    model = filled(lambda: Depth(shared, nnx.Rngs(0)))
    state = fsdp.from_model(model, TX)
    batch = fsdp.shard_batch(np.asarray(example()))
    means = fsdp.eval_step(loss_fn)(state, batch).compute()
    want = nnx.jit(loss_fn)(model, example()).compute()
    np.testing.assert_allclose(means["loss"], want, rtol=1e-12)


class Ahead(Branch):
    """Gathers ahead of a condition of its own."""

    def __call__(self, x):
        first, second = jshard.gathered(self.first), jshard.gathered(self.second)
        row = lambda x: lax.cond(x[0] > 0, lambda x: first(x), lambda x: second(x), x)
        return lax.map(row, x)


def test_gathered_ahead_units_are_called_in_branches_of_one_device():
    check_run(functools.partial(Ahead, None))


# State.


class Keeps(Residual):
    """Keeps what ``compute`` makes of its output."""

    compute: Any

    def __init__(self, rngs):
        super().__init__(rngs)
        self.kept = Counting(jnp.zeros((), float))

    def __call__(self, x):
        y = super().__call__(x)
        self.kept.set_value(type(self).compute(y))
        return y


def on_host(x):
    return jax.pure_callback(
        lambda x: np.asarray(np.sum(x)), jax.ShapeDtypeStruct((), x.dtype), x
    )


@jax.custom_vjp
def without_gradient(x):
    return on_host(x)


without_gradient.defvjp(lambda x: (on_host(x), x), lambda x, ct: (jnp.zeros_like(x),))

DIFFERS = {
    "a sum of its own": jnp.sum,
    "a sum over one axis of two": lambda x: lax.psum(jnp.sum(x), "fsdp"),
    "a sum within groups": lambda x: lax.psum(
        jnp.sum(x), "fsdp", axis_index_groups=[[0, 1], [2, 3]]
    ),
    "its place in the mesh": lambda x: 1.0 * lax.axis_index("replica"),
    "a callback": lambda x: without_gradient(jshard.pmean(jnp.sum(x))),
    "a branch": lambda x: lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0),
    "a loop": lambda x: lax.while_loop(
        lambda n: n < x[0, 0], lambda n: n + 1, jnp.zeros(())
    ),
}
EQUAL = {
    "a mean": lambda x: jshard.pmean(jnp.sum(x)),
    "sums over one axis after the other": lambda x: lax.psum(
        lax.psum(jnp.sum(x), "fsdp"), "replica"
    ),
    "the largest": lambda x: lax.pmax(
        jnp.max(lax.stop_gradient(x)), ("replica", "fsdp")
    ),
    "all of them": lambda x: jnp.sum(lax.all_gather(x, ("replica", "fsdp")) ** 2),
}


def keeping(compute: Any) -> Any:
    kind = type("Keeps", (Keeps,), {"compute": staticmethod(compute)})

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.unit = jshard.Unit(kind(rngs))

        def __call__(self, x):
            return self.unit(x)

    return Model


@pytest.mark.quick(
    "a sum of its own-1",
    "a sum over one axis of two-2",
    "a callback-1",
    "a branch-2",
    "a loop-1",
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("what", DIFFERS)
def test_state_that_may_differ_by_device_is_refused_by_name(what, accumulate):
    policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate)
    with pytest.raises(jshard.UserError, match=r"model state 'unit.kept' may end"):
        run(keeping(DIFFERS[what]), policy)


@pytest.mark.quick("sums over one")
@pytest.mark.parametrize("what", EQUAL)
def test_state_that_is_equal_everywhere_is_kept(what):
    _, _, state = run(keeping(EQUAL[what]))
    assert np.isfinite(state["unit"]["kept"].get_value())


# Weights of the loss.


def weighted(weight: Any) -> Any:
    def loss(model, x):
        y = model(x)
        main = jshard.Mean(jnp.sum(jnp.sin(y) ** 2), len(x))
        return main + weight(model, x) * jshard.Mean(jnp.sum(y**2), len(x))

    return loss


class Learned(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.weight = nnx.Param(jnp.full((), 0.3, float))


def test_a_weight_that_differs_by_device_is_refused():
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY)
    state = fsdp.from_model(filled(lambda: Learned(nnx.Rngs(0))), TX)
    step = fsdp.train_step(weighted(lambda model, x: jnp.mean(x)), TX)
    with pytest.raises(jshard.UserError, match="a weight of the loss is computed from"):
        step(state, fsdp.shard_batch(np.asarray(example())))


@pytest.mark.slow  # test_loss.py has its gradient
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_learned_weight_trains_as_on_one_device(accumulate):
    loss = weighted(lambda model, x: jnp.exp(model.weight[...]))
    policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    learned = filled(lambda: Learned(nnx.Rngs(0)))
    state, step = fsdp.from_model(learned, TX), fsdp.train_step(loss, TX)
    state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
    params: Any
    graphdef, params = nnx.split(learned)

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        model = nnx.merge(graphdef, params)
        y = model(example())
        main = jnp.sum(jnp.sin(y) ** 2) / len(y)
        return main + jnp.exp(model.weight[...]) * jnp.sum(y**2) / len(y)

    value, grads = plain(params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-12)
    got = fsdp.fetch(state.params)["weight"].get_value()
    want = params["weight"].get_value() - 0.1 * grads["weight"].get_value()
    np.testing.assert_allclose(got, want, rtol=1e-12)


# Forward mode.


def tangent(model, x):
    return jax.jvp(model, (x,), (jnp.ones_like(x),))[1]


class Tangent(Dense):
    """Asks for it within another unit."""

    def __init__(self, rngs):
        self.inner = jshard.Unit(Residual(rngs))

    def __call__(self, x):
        return tangent(self.inner, x)


@pytest.mark.parametrize(
    "result",
    [
        lambda model, x: tangent(model[0], x),
        lambda model, x: jax.vmap(jax.jacfwd(model[0]))(x),
        lambda model, x: jax.grad(lambda x: jnp.sum(tangent(model[0], x)))(x),
        lambda model, x: model[1](x),
        lambda model, x: tangent(lambda x: lax.cond(True, model[0], jnp.sin, x), x),
    ],
    ids=["jvp", "jacfwd", "grad of jvp", "within a unit", "a branch"],
)
def test_forward_mode_through_a_unit_is_refused_by_the_users_line(result):
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY, units=(Residual, Tangent))
    state = fsdp.abstract_state(
        lambda rngs: nnx.List([Residual(rngs), Tangent(rngs)]), TX
    )

    def loss(model, x):
        return jshard.Mean(jnp.sum(result(model, x)), len(x))

    ours = rf"^{re.escape(__file__)}:\d+ \(.*forward-mode .*gathered"
    for step in (fsdp.train_step(loss, TX), fsdp.eval_step(loss)):
        with pytest.raises(jshard.UserError, match=ours):
            step.trace(state, example())
