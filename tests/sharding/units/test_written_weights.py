"""Weights that a loss function changes: a teacher that follows its student."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import runpy
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from runs import POLICY
from zoo_layers import Dense, example

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]
EXAMPLE = Path(__file__).parents[3] / "examples" / "teacher.py"
TX = optax.sgd(0.1)


class Kept(nnx.Variable):
    """State of one's own."""


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.student, self.teacher = Dense(rngs, 6), Dense(rngs, 6)
        self.kept = Kept(jnp.zeros_like(self.student.kernel[...]))

    def __call__(self, x):
        return jnp.sum((self.student(x) - self.teacher(x + 1)) ** 2, -1)

    def follows(self, x):
        """The teacher moves first."""
        for mine, other in (
            (self.teacher.kernel, self.student.kernel),
            (self.teacher.bias, self.student.bias),
        ):
            mine.set_value(0.9 * mine.get_value() + 0.1 * other.get_value())
        return self(x)

    def clips(self, x):
        self.student.kernel.set_value(jnp.clip(self.student.kernel.get_value(), -1, 1))
        return self(x)

    def keeps(self, x):
        kernel = jax.lax.stop_gradient(self.student.kernel.get_value())
        self.kept.set_value(0.9 * self.kept.get_value() + 0.1 * kernel)
        return jnp.sum((self.student(x) - x @ self.kept.get_value()) ** 2, -1)

    @nnx.jit
    def compiled(self, x):
        return self(x)


class Holds(nnx.Module):
    def __init__(self, rngs):
        self.pair = Pair(rngs)


def loss_of(method: str) -> Any:
    part = lambda m: getattr(m, "pair", m)
    return lambda m, x: jshard.Mean(jnp.sum(getattr(part(m), method)(x)), len(x))


def prepared(units: tuple[type, ...], make: Any = Holds, wrt: Any = nnx.Param) -> Any:
    mesh = jshard.make_mesh(devices=jax.devices()[:2])
    fsdp = jshard.FSDP(mesh, POLICY, units=units)
    state = fsdp.from_model(filled(lambda: make(nnx.Rngs(0))), TX, wrt=wrt)
    return fsdp, state, fsdp.shard_batch(np.asarray(example()))


CHANGED = r"loss_fn changes parameter '{}'{} until .* A teacher beside a student"


@pytest.mark.parametrize("units", [(), (Pair,)], ids=["root", "units"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("follows", CHANGED.format("pair.teacher.bias", r" \(and 1 more\)")),
        ("clips", CHANGED.format("pair.student.kernel", "")),
    ],
)
def test_a_weight_that_the_loss_changes_is_named(units, method, message):
    fsdp, state, batch = prepared(units)
    with pytest.warns(UserWarning, match=message):
        fsdp.train_step(loss_of(method), TX).trace(state, batch)


@pytest.mark.parametrize("units", [(), (Pair,)], ids=["root", "units"])
def test_what_transforms_of_flax_set_again_is_not_named(units):
    fsdp, state, batch = prepared(units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "parameter .* is read outside of its unit")
        fsdp.train_step(loss_of("compiled"), TX).trace(state, batch)


def test_a_teacher_that_moves_between_steps_is_that_of_one_device():
    follow: Any = runpy.run_path(str(EXAMPLE))["follow"]
    fsdp, state, batch = prepared((Dense,), Pair, nnx.PathContains("student"))
    step = fsdp.train_step(loss_of("__call__"), TX)

    model: Any = filled(lambda: Pair(nnx.Rngs(0)))
    graphdef, students, rest = nnx.split(model, nnx.PathContains("student"), ...)

    @jax.jit
    def plain(students, rest):
        def loss(students):
            model: Any = nnx.merge(graphdef, students, rest, copy=True)
            return jnp.mean(model(example()))

        value, grads = jax.value_and_grad(loss)(students)
        students = jax.tree.map(lambda s, g: s - 0.1 * g, students, grads)
        one: Any = nnx.merge(graphdef, students, rest, copy=True)
        for name in ("kernel", "bias"):
            mine, other = getattr(one.teacher, name), getattr(one.student, name)
            mine.set_value(0.99 * mine.get_value() + 0.01 * other.get_value())
        return value, nnx.split(one, nnx.PathContains("student"), ...)[1:]

    for _ in range(2):
        state, metrics = step(state, batch)
        state: Any = follow(state)
        value, (students, rest) = plain(students, rest)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    got, want = fsdp.fetch(state.frozen)["teacher"], nnx.to_pure_dict(rest)["teacher"]
    np.testing.assert_allclose(got["kernel"].get_value(), want["kernel"], rtol=1e-9)


def test_a_variable_that_is_no_weight_keeps_what_the_loss_made_of_it():
    fsdp, state, batch = prepared((Pair,))
    want = 0.1 * fsdp.fetch(state.params)["pair"]["student"]["kernel"].get_value()
    state, _ = fsdp.train_step(loss_of("keeps"), TX)(state, batch)
    kept = fsdp.fetch(state.model_state)["pair"]["kept"].get_value()
    np.testing.assert_allclose(kept, want, rtol=1e-9)
