"""The layers that the models of the zoo are made of."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard

WIDTH, EXAMPLES, LAYERS = 8, 16, 3


class Dense(nnx.Module):
    """The layer of these tests, in the dtype that is current."""

    def __init__(self, rngs: nnx.Rngs, size: int = WIDTH):
        self.kernel = nnx.Param(rngs.uniform((WIDTH, size), dtype=float) - 0.5)
        self.bias = nnx.Param(jnp.zeros(size, dtype=float))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...] + self.bias[...]


class Residual(Dense):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(super().__call__(x))


def make_stack(layer: Any, rngs: nnx.Rngs) -> Any:
    return jshard.Stack(layer, LAYERS, rngs=rngs)


def example(dtype: Any = float) -> jax.Array:
    values = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH))
    return jax.device_put(np.asarray(values, dtype))


class Counting(nnx.Variable):
    """Model state."""


class Stateful(Residual):
    """Keeps a running mean of its input, and counts its calls."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH, dtype=float))
        self.calls = Counting(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jshard.pmean(jnp.mean(x, axis=0))
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * mean)
        self.calls.set_value(self.calls[...] + 1)
        return super().__call__(x - mean + self.mean[...])


class Toolbox(Dense):
    """Everything a class can have."""

    factor = 2

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def scale(cls, x):
        return cls.factor * x

    @property
    def rows(self):
        return self.kernel.shape[0]

    def transposed(self, x):
        return self.double(x) @ self.kernel[...].T

    @nnx.jit
    def compiled(self, x):
        return self.scale(x @ self.kernel[...])

    @nnx.remat
    def forgotten(self, x):
        return jnp.sin(x @ self.kernel[...])
