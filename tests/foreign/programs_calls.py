"""Layers that leave JAX's own arithmetic: callbacks, kernels, loops, branches, jit."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from compare import WIDTH, linear, normal, program, squares


class Activated(nnx.Module):
    """A layer with an activation of one's own."""

    def __init__(self, activation, rngs):
        self.linear = linear(WIDTH, WIDTH, rngs)
        self.activation = activation

    def __call__(self, x):
        return x + self.activation(self.linear(x))


class Network(nnx.Module):
    def __init__(self, activation, rngs):
        self.layers = nnx.List([Activated(activation, rngs) for _ in range(2)])
        self.head = linear(WIDTH, 3, rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def activated(activation, default, remat="full"):
    model = functools.partial(Network, activation)
    units = (Activated,)
    return program(model, squares, normal(WIDTH), units, default, remat=remat)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def with_derivative(function, derivative):
    """``function`` as a layer of a paper's code has it, with a backward of its own."""
    function = jax.custom_vjp(function)
    forward = lambda x: (function(x), x)
    function.defvjp(forward, lambda x, g: (g * derivative(x),))
    return function


# The host's arithmetic, in the forward and in the backward.
pure_callback = with_derivative(
    lambda x: jax.pure_callback(np.tanh, like(x), x),
    lambda x: jax.pure_callback(lambda x: 1 - np.tanh(x) ** 2, like(x), x),
)
ordered_callback = with_derivative(
    lambda x: io_callback(np.sin, like(x), x),
    lambda x: io_callback(np.cos, like(x), x),
)


def debug_callback(x):
    jax.debug.callback(lambda mean: None, jnp.mean(x))
    return jnp.tanh(x)


def swish_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] * jax.nn.sigmoid(x_ref[...])


def slope_kernel(x_ref, y_ref):
    gate = jax.nn.sigmoid(x_ref[...])
    y_ref[...] = gate * (1 + x_ref[...] * (1 - gate))


def pallas(kernel):
    return lambda x: pl.pallas_call(kernel, out_shape=like(x), interpret=True)(x)


pallas_swish = with_derivative(pallas(swish_kernel), pallas(slope_kernel))


@jax.custom_vjp
def pallas_in_rule(x):
    return pallas(swish_kernel)(x)


# The kernel itself is in the rule, as in flash attention's, not within a call.
pallas_in_rule.defvjp(
    lambda x: (pallas(swish_kernel)(x), x),
    lambda x, g: (g * pallas(slope_kernel)(x),),
)


# Foreign functions that every CPU has: LAPACK's, as a CUDA kernel is called.


def ffi_cholesky(a):
    """The lower factor of one matrix; LAPACK's is the upper of the transposed one."""
    results = (like(a), jax.ShapeDtypeStruct((), jnp.int32))
    call = jax.ffi.ffi_call("lapack_dpotrf_ffi", results, input_output_aliases={0: 0})
    return jnp.tril(call(a, uplo=np.uint8(ord("U")))[0])


@jax.custom_vjp
def log_determinant(a):
    return 2 * jnp.sum(jnp.log(jnp.diag(ffi_cholesky(a))))


def _log_determinant_backward(factor, g):
    half = jax.scipy.linalg.solve_triangular(factor, jnp.eye(len(factor)), lower=True)
    return (g * half.T @ half,)


log_determinant.defvjp(
    lambda a: (log_determinant(a), ffi_cholesky(a)), _log_determinant_backward
)


class Volume(nnx.Module):
    """A Gaussian's normalizer; its covariance depends on each example."""

    def __init__(self, rngs):
        jnp.linalg.cholesky(jnp.eye(2, dtype=float))  # JAX looks for LAPACK
        self.linear = linear(5, WIDTH, rngs)

    def __call__(self, x):
        def one(row):
            b = self.linear(row).reshape(3, -1)
            return log_determinant(b @ b.T + jnp.eye(3))

        return lax.map(one, x)


# Control flow.


class ConstantCarry(nnx.Module):
    """An exponential average from zero, and a count that no input reaches."""

    def __init__(self, rngs):
        self.linear = linear(3, WIDTH, rngs)

    def __call__(self, x_BTD):
        def step(carry, x):
            average, count = carry
            average = 0.5 * average + self.linear(x)
            return (average, count + 1), average / (1 + count)

        start = jnp.zeros((len(x_BTD), WIDTH)), 0
        (average, count), averages = lax.scan(step, start, x_BTD.swapaxes(0, 1))
        return average / count + jnp.tanh(averages).sum(0)


class Loop(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.head = ConstantCarry(rngs), linear(WIDTH, 2, rngs)

    def __call__(self, x_BTD):
        return self.head(self.inner(x_BTD))


class Calls(nnx.Variable):
    """Counts steps."""


class Alternating(nnx.Module):
    """One layer or the other, by the number of the step: equal on every device."""

    def __init__(self, rngs):
        self.even, self.odd = linear(5, WIDTH, rngs), linear(5, WIDTH, rngs)
        self.calls = Calls(jnp.zeros((), int))

    def __call__(self, x):
        calls = self.calls[...]
        self.calls.set_value(calls + 1)
        return lax.cond(
            calls % 2 == 0, lambda x: self.even(x), lambda x: self.odd(x), x
        )


class Compiled(nnx.Module):
    """``nnx.jit`` and ``jax.jit`` within the model, as methods and functions."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = linear(WIDTH, WIDTH, rngs)

        @nnx.jit
        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    def __init__(self, rngs):
        self.first, self.second = self.Layer(rngs), self.Layer(rngs)
        self.calls = Calls(jnp.zeros((), int))

    def __call__(self, x):
        @nnx.jit
        def count(calls, layer, x):
            calls.set_value(calls[...] + 1)
            return layer(x)

        x = count(self.calls, self.first, x)
        y = self.second(x)  # pyright: ignore[reportCallIssue]
        return jax.jit(jnp.sin)(y) * self.calls[...]


PROGRAMS = {
    "pure-callback": activated(pure_callback, (3, True)),
    "io-callback": activated(ordered_callback, (2, True), remat="none"),
    "debug-callback": activated(debug_callback, (3, True)),
    "pallas": activated(pallas_swish, (8, True)),
    "pallas-rule": activated(pallas_in_rule, (2, True)),
    "pallas-jit": activated(jax.jit(pallas_in_rule), (3, True), remat="dots"),
    "ffi": program(Volume, squares, normal(5), (nnx.Linear,), (2, False)),
    "constant-carry": program(Loop, squares, normal(6, 3), (ConstantCarry,), (3, True)),
    "branch": program(Alternating, squares, normal(5), (nnx.Linear,), (8, False)),
    "jit": program(Compiled, squares, normal(WIDTH), (Compiled.Layer,), (2, True)),
}
