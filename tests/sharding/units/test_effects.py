"""What a layer does to itself within a unit: sown, set, created, appended, deleted."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.collectives.shards import shard_of
from runs import POLICY, compare
from zoo_layers import LAYERS, WIDTH, Dense, example

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
    pytest.mark.filterwarnings("ignore:loss_fn changes parameter"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow..' outside of"),
]


class Sows(Dense):
    def __call__(self, x):
        y = jnp.tanh(super().__call__(x))
        self.sow(nnx.Intermediate, "aux", jnp.sum(y**2))
        return x + y

    def read(self):
        sown: Any = nnx.pop(self, nnx.Intermediate)
        return sum(map(jnp.sum, sown["aux"].get_value()))


class SetsAnAttribute(Dense):
    def __call__(self, x):
        y = jnp.tanh(super().__call__(x))
        self.aux = jnp.sum(y**2)
        return x + y

    def read(self):
        return jnp.sum(self.aux)


class CreatesAVariable(Dense):
    def __call__(self, x):
        y = jnp.tanh(super().__call__(x))
        self.aux = nnx.Variable({"sum": jnp.sum(y**2)})
        return x + y

    def read(self):
        return jnp.sum(self.aux.get_value()["sum"])


class CreatesAParameter(Dense):
    def __call__(self, x):
        if not hasattr(self, "gain"):
            self.gain = nnx.Param(jnp.ones(WIDTH) * 0.5)
        return x + jnp.tanh(super().__call__(x)) * self.gain[...]

    def read(self):
        return jnp.sum(self.gain[...])


class WritesItsParameter(Dense):
    """Normalizes its weight in place, as spectral normalization does."""

    def __call__(self, x):
        self.kernel.set_value(self.kernel[...] / jnp.linalg.norm(self.kernel[...]))
        return x + jnp.tanh(super().__call__(x))

    def read(self):
        return jnp.sum(self.kernel[...] ** 3)


class Counts(Dense):
    """Counts in a plain number, which its computation depends on."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + jnp.tanh(super().__call__(x)) / self.calls

    def read(self):
        return jnp.asarray(float(self.calls))


class KeepsADict(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.Dict()

    def __call__(self, x):
        y = jnp.tanh(super().__call__(x))
        self.seen["aux"] = jnp.sum(y**2)
        return x + y

    def read(self):
        return jnp.sum(self.seen["aux"])


class Inner(nnx.Module):
    """What changes is a submodule of the unit."""

    def __init__(self, rngs):
        self.inner = SetsAnAttribute(rngs)

    def __call__(self, x):
        return self.inner(x)

    def read(self):
        return self.inner.read()


class Appends(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = []

    def __call__(self, x):
        y = jnp.tanh(super().__call__(x))
        self.seen.append(jnp.sum(y**2))
        return x + y

    def read(self):
        return sum(map(jnp.sum, self.seen))


class Deletes(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.first = True

    def __call__(self, x):
        if hasattr(self, "first"):
            del self.first
            return x + super().__call__(x)
        return x + jnp.tanh(super().__call__(x))

    def read(self):
        return jnp.asarray(1.0 - hasattr(self, "first"))


class Everything(Dense):
    """All of the above but the parameter, the dict and what is deleted."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls, self.seen, self.inner = 0, [], SetsAnAttribute(rngs)

    def __call__(self, x):
        self.calls += 1
        self.kernel.set_value(self.kernel[...] / jnp.linalg.norm(self.kernel[...]))
        y = jnp.tanh(super().__call__(x)) / self.calls
        self.sow(nnx.Intermediate, "sown", jnp.sum(y**2))
        self.seen.append(jnp.sum(y**3))
        self.aux = nnx.Variable({"sum": jnp.sum(y**4)})
        return self.inner(x + y)

    def read(self):
        sown: Any = nnx.pop(self, nnx.Intermediate)
        values = [*sown["sown"].get_value(), *self.seen, self.aux.get_value()["sum"]]
        return sum(map(jnp.sum, values)) + self.inner.read()


KINDS = [
    Everything,
    Sows,
    SetsAnAttribute,
    CreatesAVariable,
    CreatesAParameter,
    WritesItsParameter,
    Counts,
    KeepsADict,
    Appends,
    Inner,
    Deletes,
]
kinds = pytest.mark.parametrize("layer", KINDS, ids=lambda kind: kind.__name__)


class Twice(nnx.Module):
    """Calls what it has twice."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, x):
        return self.inner(self.inner(x))


def steps(make_model: Any, layer: Any, devices: int, units: tuple = ()) -> Any:
    """Losses, gradient norms and parameters of two steps."""

    def loss(model, x):
        main = jshard.Mean(jnp.sum(jnp.sin(model(x)) ** 2), len(x))
        return main + 0.1 * jshard.Mean(layer.read(model.inner), 1)

    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, POLICY, units=units)
    tx, history = optax.sgd(0.1), []
    model = filled(lambda: make_model(nnx.Rngs(0)))
    state, step = fsdp.from_model(model, tx), fsdp.train_step(loss, tx)
    for _ in range(2):
        state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
        history.append((metrics["loss"], metrics["grad_norm"]))
    return history, fsdp.fetch(state.params)


@pytest.mark.slow  # by default the layers of a stack, below
@pytest.mark.parametrize(
    ("devices", "layer"),
    [
        (4, Everything),
        *(
            pytest.param(devices, layer, marks=pytest.mark.slow)
            for devices in (1, 4)
            for layer in KINDS
            if (devices, layer) != (4, Everything)
        ),
    ],
)
def test_a_unit_is_changed_by_a_call_as_a_plain_module_is(devices, layer):
    make_model = lambda rngs: Twice(layer(rngs))
    plain = steps(make_model, layer, devices)
    compare(steps(make_model, layer, devices, units=(layer,)), plain)


@pytest.mark.quick("4-Everything")
@kinds
@pytest.mark.parametrize("devices", [1, 4])
def test_the_layers_of_a_stack_leave_what_they_would_leave_one_by_one(devices, layer):
    make_model = lambda rngs: Twice(jshard.Stack(layer, LAYERS, rngs=rngs))
    start = nnx.state(filled(lambda: make_model(nnx.Rngs(0))).inner, nnx.Param)

    @jax.jit
    @jax.value_and_grad
    def loss(params, x):
        layers = []
        for i in range(LAYERS):
            one = nnx.eval_shape(lambda: layer(nnx.Rngs(0)))
            nnx.update(one, jax.tree.map(lambda p, i=i: p[i], params))
            layers.append(one)
        y = x
        for one in [*layers, *layers]:
            y = one(y)
        # One number, or flag, serves all layers of a Stack.
        own = layers[:1] if layer in (Counts, Deletes) else layers
        aux = sum(layer.read(one) for one in own)
        return jnp.sum(jnp.sin(y) ** 2) / len(x) + 0.1 * aux

    got, _ = steps(make_model, layer, devices)
    examples = example().reshape(devices, -1, WIDTH)
    parts = [jax.device_get(loss(start, x)) for x in examples]
    mean = lambda *values: sum(values) / devices
    value, grads = jax.tree.map(mean, *parts)
    compare(got[0], (value, optax.tree.norm(grads)))


@pytest.mark.slow  # above, and test_linen_collections.py
@pytest.mark.parametrize("units", [(), (Sows,)], ids=["plain", "unit"])
def test_flax_captures_what_is_sown_in_a_unit(units):
    def loss(model, x):
        captured: Any
        y, captured = nnx.capture(model, nnx.Intermediate)(x)
        aux = sum(map(jnp.sum, captured["inner"]["aux"].get_value()))
        return jshard.Mean(jnp.sum(y**2), len(x)) + 0.1 * jshard.Mean(aux, 1)

    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY, units=units)
    model = filled(lambda: Twice(Sows(nnx.Rngs(0))))
    state = fsdp.from_model(model, optax.sgd(0.1))
    step = fsdp.train_step(loss, optax.sgd(0.1))
    _, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
    captured: Any
    y, captured = nnx.capture(model, nnx.Intermediate)(example())
    aux = sum(map(jnp.sum, captured["inner"]["aux"].get_value())) / 8
    want = jnp.sum(y**2) / len(y) + 0.1 * aux
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-9)


class Recomputed(Dense):
    """A transform of Flax sets all that the module has, changed or not."""

    @nnx.remat
    def __call__(self, x):
        return x + jnp.tanh(super().__call__(x))


def test_weights_that_a_transform_of_flax_returns_do_not_outlive_their_unit():
    found = []

    def loss(model, x):
        y = model(x)
        found.append(shard_of(model.inner.kernel))
        return jshard.Mean(jnp.sum(y**2), len(x))

    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY, units=(Recomputed,))
    state = fsdp.init(lambda rngs: Twice(Recomputed(rngs)), optax.sgd(0.1))
    fsdp.eval_step(loss)(state, fsdp.shard_batch(np.asarray(example())))
    assert found[0] is not None
