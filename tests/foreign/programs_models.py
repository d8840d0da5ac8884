"""Architectures as their public implementations have them."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jshard
from compare import EXAMPLES, WIDTH, linear, normal, program, squares

# A graph network: messages along edges, summed at their receivers.

NODES, EDGES, FEATURES = 5, 9, 8


class MessagePassing(nnx.Module):
    def __init__(self, rngs):
        self.message = linear(2 * FEATURES, WIDTH, rngs)
        self.update = linear(FEATURES + WIDTH, FEATURES, rngs)

    def __call__(self, nodes_NF, senders_E, receivers_E):
        pairs = jnp.concatenate([nodes_NF[senders_E], nodes_NF[receivers_E]], axis=-1)
        messages_EM = nnx.relu(self.message(pairs))
        sums_NM = jax.ops.segment_sum(messages_EM, receivers_E, len(nodes_NF))
        both = jnp.concatenate([nodes_NF, sums_NM], axis=-1)
        return nodes_NF + jnp.tanh(self.update(both))


class GraphNetwork(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([MessagePassing(rngs) for _ in range(2)])
        self.readout = linear(FEATURES, 1, rngs)

    def __call__(self, graphs):
        """Runs on a batch of graphs as on one graph that is not connected."""
        number = len(graphs["nodes"])
        offsets = NODES * jnp.arange(number)[:, None]
        edges = [(graphs[k] + offsets).ravel() for k in ("senders", "receivers")]
        nodes = graphs["nodes"].reshape(-1, FEATURES)
        for layer in self.layers:
            nodes = layer(nodes, *edges)
        graph_of_node = jnp.repeat(jnp.arange(number), NODES)
        values = self.readout(nodes)[:, 0] / NODES
        return jax.ops.segment_sum(values, graph_of_node, number)


def graphs(rng):
    return {
        "nodes": rng.normal(size=(EXAMPLES, NODES, FEATURES)),
        "senders": rng.integers(0, NODES, (EXAMPLES, EDGES)),
        "receivers": rng.integers(0, NODES, (EXAMPLES, EDGES)),
        "targets": rng.normal(size=EXAMPLES),
    }


def graph_loss(model, batch):
    return jnp.sum((model(batch) - batch["targets"]) ** 2), len(batch["targets"])


# A state-space model: a linear recurrence with complex eigenvalues, in parallel.


class Recurrence(nnx.Module):
    def __init__(self, rngs, d=WIDTH):
        self.decay = nnx.Param(jnp.linspace(-1, 1, d, dtype=float))
        self.angle = nnx.Param(jnp.linspace(0.1, 2, d, dtype=float))
        self.into, self.out = linear(4, d, rngs), linear(2 * d, 4, rngs)

    def __call__(self, x_BTD):
        eigenvalues = jnp.exp(-jnp.exp(self.decay[...]) + 1j * self.angle[...])
        u_BTN = self.into(x_BTD).astype(complex)
        a_BTN = jnp.broadcast_to(eigenvalues, u_BTN.shape)
        combine = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
        _, h_BTN = lax.associative_scan(combine, (a_BTN, u_BTN), axis=1)
        h_BTN = jnp.concatenate([h_BTN.real, h_BTN.imag], axis=-1)
        return x_BTD + nnx.gelu(self.out(h_BTN))


class StateSpaceModel(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Recurrence(rngs) for _ in range(2)])

    def __call__(self, x_BTD):
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return x_BTD[:, -1]


# A U-Net, of whose widths most divide by no number of devices.


class Convolutions(nnx.Module):
    def __init__(self, d_in, d_out, rngs):
        conv = functools.partial(nnx.Conv, param_dtype=float, rngs=rngs)
        self.first = conv(d_in, d_out, kernel_size=(3, 3))
        self.norm = nnx.LayerNorm(d_out, param_dtype=float, rngs=rngs)
        self.second = conv(d_out, d_out, kernel_size=(3, 3))

    def __call__(self, x_BHWC):
        return nnx.silu(self.second(nnx.silu(self.norm(self.first(x_BHWC)))))


class UNet(nnx.Module):
    def __init__(self, rngs, widths=(5, 7, 8)):
        outer, inner, last = widths
        two = {"kernel_size": (2, 2), "strides": 2, "param_dtype": float, "rngs": rngs}
        self.encode = Convolutions(1, outer, rngs)
        self.down = nnx.Conv(outer, inner, **two)
        self.middle = Convolutions(inner, inner, rngs)
        self.up = nnx.ConvTranspose(inner, outer, **two)
        self.decode = Convolutions(2 * outer, last, rngs)
        self.head = nnx.Conv(last, 1, kernel_size=(1, 1), param_dtype=float, rngs=rngs)

    def __call__(self, x_BHWC):
        skip = self.encode(x_BHWC)
        up = self.up(self.middle(self.down(skip)))
        return self.head(self.decode(jnp.concatenate([skip, up], axis=-1)))


# Networks with loops: an LSTM, and a fixed point with its implicit gradient.


class Lstm(nnx.Module):
    def __init__(self, rngs):
        self.rnn: Any = nnx.RNN(nnx.LSTMCell(3, WIDTH, param_dtype=float, rngs=rngs))
        self.head = linear(WIDTH, 2, rngs)

    def __call__(self, x_BTD):
        return self.head(self.rnn(x_BTD)[:, -1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, inputs, start):
    """The ``z`` with ``z == f(inputs, z)``."""

    def moves(carry):
        before, z = carry
        return jnp.max(jnp.abs(z - before)) > 1e-14

    step = lambda carry: (carry[1], f(inputs, carry[1]))
    return lax.while_loop(moves, step, (start, f(inputs, start)))[1]


def _fixed_point_forward(f, inputs, start):
    z = fixed_point(f, inputs, start)
    return z, (inputs, z)


def _fixed_point_backward(f, residuals, gradient):
    inputs, z = residuals
    _, of_inputs = jax.vjp(lambda inputs: f(inputs, z), inputs)

    def adjoint(packed, w):
        inputs, z, gradient = packed
        _, of_z = jax.vjp(lambda z: f(inputs, z), z)
        return gradient + of_z(w)[0]

    w = fixed_point(adjoint, (inputs, z, gradient), jnp.zeros_like(gradient))
    return *of_inputs(w), jnp.zeros_like(z)


fixed_point.defvjp(_fixed_point_forward, _fixed_point_backward)


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.of_state, self.of_input = (
            linear(WIDTH, WIDTH, rngs),
            linear(3, WIDTH, rngs),
        )

    def __call__(self, x, z):
        return jnp.tanh(0.2 * self.of_state(z) + self.of_input(x))


class Equilibrium(nnx.Module):
    def __init__(self, rngs):
        self.cell = Cell(rngs)

    def __call__(self, x):
        graphdef, params = nnx.split(self.cell)
        f = lambda inputs, z: nnx.merge(graphdef, inputs[0])(inputs[1], z)
        return fixed_point(f, (params, x), jnp.zeros((len(x), WIDTH)))


class DeepEquilibriumModel(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.head = Equilibrium(rngs), linear(WIDTH, 2, rngs)

    def __call__(self, x):
        return self.head(self.layer(x))


# A vector-quantized autoencoder: the codes are averages of what they stand for.


class Codebook(nnx.Variable):
    """State that no gradient reaches."""


class Quantizer(nnx.Module):
    def __init__(self, rngs, codes=7, d=WIDTH):
        values = rngs.normal((codes, d), dtype=float)
        self.sums, self.counts = Codebook(values), Codebook(jnp.ones(codes))
        self.scale = nnx.Param(jnp.ones(d, dtype=float))

    def __call__(self, x_BD):
        codes_KD = self.sums[...] / self.counts[...][:, None]
        distances_BK = jnp.sum((x_BD[:, None] - codes_KD) ** 2, axis=-1)
        ids_B = jnp.argmin(distances_BK, axis=-1)
        chosen_BK = jax.nn.one_hot(ids_B, len(codes_KD), dtype=float)
        batch = (jnp.mean(chosen_BK, axis=0), chosen_BK.T @ x_BD / len(x_BD))
        counts, sums = jshard.pmean(lax.stop_gradient(batch))
        self.counts.set_value(0.9 * self.counts[...] + 0.1 * counts)
        self.sums.set_value(0.9 * self.sums[...] + 0.1 * sums)
        quantized_BD = codes_KD[ids_B]
        commitment = jnp.sum((x_BD - lax.stop_gradient(quantized_BD)) ** 2)
        straight_BD = x_BD + lax.stop_gradient(quantized_BD - x_BD)
        return straight_BD * self.scale[...], commitment


class VectorQuantized(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.decoder = linear(5, WIDTH, rngs), linear(WIDTH, 5, rngs)
        self.quantizer = Quantizer(rngs)

    def __call__(self, x):
        codes, commitment = self.quantizer(self.encoder(x))
        return self.decoder(codes), commitment


def autoencoder_loss(model, x):
    y, commitment = model(x)
    return jnp.sum((y - x) ** 2) + 0.25 * commitment, len(x)


# Layers around layers: they write the parameters of the layer within.


class SpectralNorm(nnx.Module):
    def __init__(self, rngs):
        normed = lambda layer: nnx.SpectralNorm(
            layer, n_steps=2, param_dtype=float, rngs=rngs
        )
        self.first = normed(linear(5, WIDTH, rngs))
        self.second = normed(linear(WIDTH, 3, rngs))

    def __call__(self, x):
        h = nnx.relu(self.first(x, update_stats=True))
        return self.second(h, update_stats=True)


class WeightNorm(nnx.Module):
    def __init__(self, rngs):
        normed = lambda layer: nnx.WeightNorm(layer, param_dtype=float, rngs=rngs)
        self.first = normed(linear(5, WIDTH, rngs))
        self.second = normed(linear(WIDTH, 3, rngs))

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class Mlp(nnx.Module):
    """With the exact GELU, which is made of the error function."""

    def __init__(self, rngs):
        self.up, self.down = linear(6, WIDTH, rngs), linear(WIDTH, 6, rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x), approximate=False))


class ExactGelu(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Mlp(rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def images(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(EXAMPLES, 4, 6, 1))


PROGRAMS = {
    "gnn": program(GraphNetwork, graph_loss, graphs, (MessagePassing,), (8, True)),
    "state-space": program(
        StateSpaceModel, squares, normal(6, 4), (Recurrence,), (3, True)
    ),
    "wide unet": program(
        functools.partial(UNet, widths=(17, 35, 70)),
        squares,
        images,
        (Convolutions, nnx.Conv),
        (6, True),
    ),
    "unet": program(UNet, squares, images, (Convolutions, nnx.Conv), (3, True)),
    "lstm": program(Lstm, squares, normal(5, 3), (nnx.RNN, nnx.Linear), (4, True)),
    "deq": program(
        DeepEquilibriumModel, squares, normal(3), (Equilibrium, nnx.Linear), (2, True)
    ),
    "vq": program(
        VectorQuantized, autoencoder_loss, normal(5), (Quantizer, nnx.Linear), (8, True)
    ),
    "spectral-norm": program(
        SpectralNorm, squares, normal(5), (nnx.SpectralNorm,), (2, True)
    ),
    "weight-norm": program(
        WeightNorm, squares, normal(5), (nnx.WeightNorm,), (3, False)
    ),
    "exact-gelu": program(ExactGelu, squares, normal(6), (Mlp,), (4, False)),
}
