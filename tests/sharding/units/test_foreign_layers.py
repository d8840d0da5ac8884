"""Layers that know nothing of a mesh: loops from constants, state of weights alone."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.lax import scan  # by its name, before any step is traced

import jshard
from parity import make_mesh
from runs import as_unit, check_run, compare, everywhere, run
from zoo_layers import WIDTH, Counting, Dense

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

TX = optax.sgd(0.1)


class Lstm(nnx.Module):
    def __init__(self, rngs):
        self.rnn: Any = nnx.RNN(
            nnx.OptimizedLSTMCell(2, WIDTH, rngs=rngs, param_dtype=float)
        )

    def __call__(self, x):
        return x + self.rnn(x.reshape(len(x), -1, 2))[:, -1]


class Gru(nnx.Module):
    """Both ways, of lengths of their own."""

    def __init__(self, rngs):
        cell = lambda: nnx.RNN(nnx.GRUCell(2, 4, rngs=rngs, param_dtype=float))
        self.rnn: Any = nnx.Bidirectional(cell(), cell())

    def __call__(self, x):
        lengths = 1 + jnp.argmax(x[:, :4], axis=1)
        return x + self.rnn(x.reshape(len(x), -1, 2), seq_lengths=lengths)[:, -1]


class Scan(Dense):
    def __call__(self, x):
        step = lambda carry, y: (jnp.tanh(carry + y), carry)
        last, carries = lax.scan(step, jnp.zeros(len(x)), super().__call__(x).T)
        return x + last[:, None] * carries.T


class ScanByName(Dense):
    """Of second order, with a counter, and a part that starts over."""

    def __call__(self, x):
        def step(state, y):
            a, b, count, again = state
            return (b, y + a / 2, count + 1, np.zeros(len(x))), again + b

        one = np.ones(len(x))
        start = (one, jnp.zeros(len(x)), 0, one)
        (_, b, count, _), ys = scan(step, start, super().__call__(x).T)
        return x + b[:, None] * ys.T / count


class ScanInScan(Dense):
    def __call__(self, x):
        def outer(total, y):
            inner = lambda carry, scale: (jnp.sin(carry * scale + y), None)
            return total + scan(inner, 0.5, jnp.arange(3.0))[0], None

        row = jax.vmap(lambda ys: scan(outer, 0.0, ys)[0])
        return x + row(super().__call__(x))[:, None]  # pyright: ignore[reportIndexIssue]


class LearnedStart(Dense):
    """A replicated parameter is the first carry, of a loop that is linearised again."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.start = nnx.Param(jnp.linspace(0, 1, 3, dtype=float))

    def __call__(self, x):
        @jax.checkpoint
        def row(y):
            step = lambda carry, v: (jnp.tanh(carry + v), None)
            return lax.scan(step, self.start[...], y)[0].sum()

        return x + jax.vmap(row)(super().__call__(x))[:, None]


class Loops(Dense):
    """fori_loop, of a number of turns that is fixed and of one that depends on x."""

    def __call__(self, x):
        y = super().__call__(x)
        turn = lambda i, carry: (carry[0] + y[:, i], carry[1] + 1)
        total, _ = lax.fori_loop(0, WIDTH, turn, (jnp.zeros(len(x)), 0))

        def count(row):
            return lax.fori_loop(0, 1 + jnp.argmax(row), lambda i, c: c + 2.0, 0.0)

        return x + (total * jax.vmap(count)(x))[:, None]


class While(Dense):
    def __call__(self, x):
        def halvings(row):
            step = lambda state: (state[0] + 1, state[1] / 2)
            goes_on = lambda state: jnp.abs(state[1]).max() > 0.1
            return lax.while_loop(goes_on, step, (0, row))[0]

        turns: Any = jax.vmap(halvings)(x)
        return super().__call__(x) * turns[:, None]


class Branches(Dense):
    """Some return constants; the first one first, and the last one last."""

    def __call__(self, x):
        def row(y):
            a = lax.cond(y[0] > 0, lambda: 0.5, lambda: y.mean())
            b = lax.cond(y[1] > 0, lambda y: (y * 2).mean(), lambda y: 0.25, y)
            c = lax.switch(
                jnp.argmax(y) % 3, [lambda: 1.0, lambda: 2.0, lambda: y.max()]
            )
            return a + b + c + lax.cond(y[2] > 0, lambda: 3.0, lambda: 4.0)

        return x + lax.map(row, super().__call__(x))[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def scaled(x, w, mask, factor) -> Any:
    return x * w * mask * factor


scaled.defvjp(
    lambda x, w, mask, factor: (scaled(x, w, mask, factor), (x, w, mask)),
    lambda factor, saved, ct: (
        factor * ct * saved[1] * saved[2],
        jnp.sum(factor * ct * saved[0] * saved[2], axis=0),
        jnp.zeros(WIDTH),
    ),
)


class CustomVjp(Dense):
    """A backward of its own, that differentiates constants too."""

    def __call__(self, x):
        constant: Any = scaled(x, jnp.linspace(0.5, 1, WIDTH), np.ones(WIDTH), 0.5)
        y, scale = super().__call__(constant), self.bias[...] + 1
        more: Any = scaled(y, scale, x[0] * 0 + 2, factor=2.0)
        return x + more


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


def rounded_jvp(primals, _) -> Any:
    return rounded(*primals), np.zeros(primals[0].shape)


rounded.defjvp(rounded_jvp)


class CustomJvp(Dense):
    def __call__(self, x):
        y = super().__call__(x)
        return y + rounded(4 * x) * y


class Nnx(nnx.Module):
    """The loops of Flax, one of which is jitted."""

    def __init__(self, rngs):
        self.dense = Dense(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
        def over_columns(dense, carry, column):
            carry = jnp.tanh(carry + dense(x).mean(1) + column)
            return carry, carry

        carry, ys = nnx.jit(over_columns)(self.dense, jnp.zeros(len(x)), x)
        ones = lambda dense, y: jnp.ones(y.shape)
        apply = lambda dense, y: dense(y)
        big = nnx.cond(self.dense.bias[...].sum() >= 0, ones, apply, self.dense, ys)
        return x + ys * carry[:, None] + big


LAYERS = [
    Lstm,
    Gru,
    Scan,
    ScanByName,
    ScanInScan,
    LearnedStart,
    Loops,
    While,
    Branches,
    CustomVjp,
    CustomJvp,
    Nnx,
]


class Several(nnx.Module):
    """A Unit of each of these: one step is sooner compiled than one for each."""

    def __init__(self, rngs):
        layers = (ScanByName, Loops, Branches, CustomVjp, CustomJvp)
        self.units = nnx.List([jshard.Unit(layer(rngs)) for layer in layers])

    def __call__(self, x):
        for unit in self.units:
            x = jnp.sin(unit(x))
        return x


def test_loops_branches_and_derivatives_may_begin_with_constants():
    check_run(Several)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS, ids=lambda m: m.__name__)
def test_so_they_may_each_alone(layer):
    check_run(as_unit(layer))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
@pytest.mark.parametrize("layer", [Lstm, ScanByName, Branches, CustomVjp])
def test_so_they_may_in_the_root_and_in_a_stack_with_every_remat(layer, remat):
    policy = jshard.Policy(remat=remat, accumulate=2, min_shard_elements=0)
    check_run(everywhere(layer), policy)


class Head(nnx.Linear):
    """Not the linear layers in the LSTM, which belong to that unit."""


class Classifier(nnx.Module):
    """Of sequences of tokens, as in Flax's own examples."""

    def __init__(self, rngs):
        wide = {"param_dtype": float, "rngs": rngs}
        self.embed = nnx.Embed(16, 6, **wide)
        self.lstm: Any = nnx.RNN(nnx.OptimizedLSTMCell(6, 8, **wide))
        self.head = Head(8, 3, **wide)

    def __call__(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[:, -1])


def classify(model, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens), tokens[:, 0] % 3
    )
    return jshard.Mean(jnp.sum(losses), losses.size)


def tokens_of(step):
    return np.random.default_rng(step).integers(0, 16, (24, 5))


@functools.cache
def classifier_on_one_device():
    """Losses and parameters of three steps, with Flax and optax alone."""
    graphdef, params, rest = nnx.split(
        Classifier(nnx.Rngs(jax.random.key(0))), nnx.Param, ...
    )

    @jax.jit
    @jax.value_and_grad
    def loss(params, tokens):
        mean = classify(nnx.merge(graphdef, params, rest, copy=True), tokens)
        return mean.total / mean.count

    losses = []
    for step in range(3):
        value, grads = loss(params, tokens_of(step))
        losses.append(value)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return losses, params


@pytest.mark.slow  # by default the loops above
@pytest.mark.parametrize(
    ("devices", "remat"),
    [
        (1, "full"),
        (2, "dots"),
        (3, "none"),
        (4, "full"),
        (8, "none"),
    ],
)
def test_an_lstm_classifier_trains_as_on_one_device(devices, remat):
    policy = jshard.Policy(remat=remat, min_shard_elements=0)
    units = (nnx.RNN, nnx.Embed, Head)
    fsdp = jshard.FSDP(make_mesh(1, devices), policy, units=units)
    state = fsdp.init(Classifier, TX)
    step, losses = fsdp.train_step(classify, TX), []
    for i in range(3):
        state, metrics = step(state, fsdp.shard_batch(tokens_of(i)))
        losses.append(metrics["loss"])
    compare((losses, fsdp.fetch(state.params)), classifier_on_one_device())


# State of weights alone.


class Spectral(nnx.Module):
    def __init__(self, rngs):
        linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=float)
        self.norm = nnx.SpectralNorm(linear, n_steps=2, rngs=rngs, param_dtype=float)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:loss_fn changes parameter")  # as Flax's module does
def test_spectral_norm_is_that_of_one_device_in_the_root_a_unit_and_a_stack():
    check_run(everywhere(Spectral))


class ChosenByDevice(Dense):
    """Each branch is a constant; which one depends on a device's examples."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.sign = Counting(jnp.zeros(()))

    def __call__(self, x):
        self.sign.set_value(lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: -1.0))
        return super().__call__(x)


class CountedByDevice(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.turns = Counting(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        turns = lax.while_loop(lambda n: n < x[0, 0], lambda n: n + 1, jnp.int32(0))
        self.turns.set_value(turns)
        return super().__call__(x)


@pytest.mark.parametrize("layer", [ChosenByDevice, CountedByDevice])
def test_a_constant_that_a_device_chooses_is_not_the_same_on_all(layer):
    with pytest.raises(jshard.UserError, match="different on each device"):
        run(as_unit(layer))


# After a step.


@pytest.mark.quick("as_unit")
@pytest.mark.parametrize("place", [as_unit, everywhere], ids=["as_unit", "everywhere"])
def test_the_exact_gelu_trains_as_on_one_device(place):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs, param_dtype=float)

        def __call__(self, x):
            return nnx.gelu(self.linear(x), approximate=False)

    with jax.enable_x64(True):
        check_run(place(Layer))
