"""What modules hold besides parameters, and parameters of unusual kinds."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from compare import WIDTH, linear, normal, program, squares


def layers_of(layer):
    """A model of three equal layers."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([layer(rngs) for _ in range(3)])

        def __call__(self, x):
            for each in self.layers:
                x = each(x)
            return x

    return Model


def layered(layer, loss, default):
    return program(layers_of(layer), loss, normal(WIDTH), (layer,), default)


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.linear = linear(WIDTH, WIDTH, rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


# Parameters of unusual kinds.


class Kinds(nnx.Module):
    """Complex, scalar, empty and integer ones, and one that nothing uses."""

    def __init__(self, rngs):
        wave = rngs.normal((5, WIDTH, 2), dtype=float)
        self.wave = nnx.Param(wave[..., 0] + 1j * wave[..., 1])
        self.scale = nnx.Param(jnp.asarray(0.5, dtype=float))
        self.empty = nnx.Param(jnp.zeros((3, 0), dtype=float))
        self.order = nnx.Param(jnp.arange(WIDTH)[::-1])
        self.unused = nnx.Param(jnp.ones((WIDTH, 3), dtype=float))

    def __call__(self, x):
        y = jnp.abs(x @ self.wave[...])[:, self.order[...]] + self.empty[...].sum()
        return self.scale[...] * y


class OddKinds(nnx.Module):
    def __init__(self, rngs):
        self.kinds, self.unused = Kinds(rngs), linear(WIDTH, 3, rngs)
        self.head = linear(WIDTH, 2, rngs)

    def __call__(self, x):
        return self.head(self.kinds(x))


def inexact(path, leaf):
    """What has a gradient; an integer parameter stays as it is."""
    return isinstance(leaf, nnx.Param) and jnp.issubdtype(leaf.dtype, jnp.inexact)


# Arrays that are in no Variable.


class NumpyTable(Dense):
    """Positions as the Transformer's code makes them."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = np.sin(np.arange(float(WIDTH)))

    def __call__(self, x):
        return super().__call__(x + self.table)


class DataTable(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.tables = nnx.data(
            {"shift": np.linspace(0, 1, WIDTH), "scale": np.float64(2)}
        )

    def __call__(self, x):
        return super().__call__(x * self.tables["scale"] + self.tables["shift"])


class JaxTable(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = jnp.cos(jnp.arange(WIDTH, dtype=float))

    def __call__(self, x):
        return super().__call__(x * self.table)


# What a layer does to itself while it runs.


class Sows(Dense):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "energy", jnp.sum(y**2))
        return y


def sown_loss(model, x):
    total, count = squares(model, x)
    sown = nnx.pop(model, nnx.Intermediate)
    leaves = jax.tree.leaves(sown)
    assert len(leaves) == 3
    return total + 0.1 * sum(leaves), count


def captured_loss(model, x):
    forward = nnx.capture(lambda model, x: squares(model, x), nnx.Intermediate)
    (total, count), sown = forward(model, x)
    return total + 0.1 * sum(jax.tree.leaves(sown)), count


class SetsAttribute(Dense):
    """An auxiliary loss in a plain attribute, as routers leave it."""

    def __call__(self, x):
        y = super().__call__(x)
        self.auxiliary = jnp.sum(jnp.abs(y))
        return y


def auxiliary_loss(model, x):
    total, count = squares(model, x)
    return total + 0.1 * sum(layer.auxiliary for layer in model.layers), count


class MakesVariable(Dense):
    def __call__(self, x):
        y = super().__call__(x)
        self.last = nnx.Cache(y)
        return y


def variable_loss(model, x):
    total, count = squares(model, x)
    return total + 0.1 * sum(jnp.sum(each.last[...]) for each in model.layers), count


class CountsItself(Dense):
    """A number that each call raises and the next one reads."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) / self.calls


def counting_loss(model, x):
    total, count = squares(lambda x: model(model(x)), x)
    return total * sum(each.calls for each in model.layers) / 6, count


class Appends(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.outputs = nnx.List([])

    def __call__(self, x):
        self.outputs.append(super().__call__(x))
        return self.outputs[-1]


def appended_loss(model, x):
    total, count = squares(lambda x: model(model(x)), x)
    kept = [y for each in model.layers for y in each.outputs]
    assert len(kept) == 6
    return total + 0.1 * sum(jnp.sum(y**2) for y in kept), count


PROGRAMS = {
    "kinds": program(
        OddKinds, squares, normal(5), (Kinds, nnx.Linear), (3, True), inexact
    ),
    "numpy-table": layered(NumpyTable, squares, (2, True)),
    "data-table": layered(DataTable, squares, (8, False)),
    "jax-table": layered(JaxTable, squares, (4, True)),
    "sow": layered(Sows, sown_loss, (2, True)),
    "capture": layered(Sows, captured_loss, (3, True)),
    "attribute": layered(SetsAttribute, auxiliary_loss, (8, True)),
    "variable": layered(MakesVariable, variable_loss, (4, True)),
    "counter": layered(CountsItself, counting_loss, (1, True)),
    "list": layered(Appends, appended_loss, (8, True)),
}
