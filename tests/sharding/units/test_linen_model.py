"""jshard.linen.Model: a Linen model as it is, its layers in a list or scanned."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hlo
import jshard
from parity import make_mesh, make_update

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
SCAN: Any = linen.scan  # its own types forbid linen.broadcast
V, T, WIDTH, HIDDEN, LAYERS, EXAMPLES = 72, 8, 16, 40, 3, 16


class Block(linen.Module):
    dtype: Any = jnp.float64
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, scale):
        wide = {"dtype": self.dtype, "param_dtype": self.dtype}
        h = linen.Dense(HIDDEN, **wide)(linen.LayerNorm(**wide)(x) * scale)
        h = linen.Dense(WIDTH, **wide)(linen.gelu(h))
        return x + linen.Dropout(self.rate, deterministic=not self.rate)(h)


class Scanned(Block):
    @linen.compact
    def __call__(self, x, scale):
        return Block(self.dtype, self.rate, name="block")(x, scale), None


class Transformer(linen.Module):
    """Tied embedding, a position in the root, blocks, a norm in the root."""

    layers: str
    dtype: Any = jnp.float64
    rate: float = 0.0

    def setup(self):
        wide = {"dtype": self.dtype, "param_dtype": self.dtype}
        self.embed = linen.Embed(V, WIDTH, **wide)
        self.position = self.param(
            "position", linen.initializers.normal(), (T, WIDTH), self.dtype
        )
        make = {"list": Block, "remat": linen.remat(Block)}
        if "scan" in self.layers:
            layer = {"scan": Scanned, "scan-remat": linen.remat(Scanned)}
            self.blocks: Any = SCAN(
                layer[self.layers],
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=linen.broadcast,
                length=LAYERS,
            )(self.dtype, self.rate)
        else:
            layers = [make[self.layers] for _ in range(LAYERS)]
            self.blocks = [layer(self.dtype, self.rate) for layer in layers]
        self.norm = linen.LayerNorm(**wide)

    def __call__(self, tokens, scale=1.0):
        x = self.embed(tokens) + self.position
        if "scan" in self.layers:
            x, _ = self.blocks(x, jnp.asarray(scale, self.dtype))
        else:
            for block in self.blocks:
                x = block(x, scale)
        return self.embed.attend(self.norm(x))


UNITS = (Block, linen.Embed)
TOKENS = np.zeros((1, T), int)


def wrapped(module: linen.Module, **options: Any) -> Any:
    return lambda rngs: jshard.linen.Model(
        module, TOKENS, units=UNITS, rngs=rngs, **options
    )


def cross_entropy(logits, tokens):
    targets = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def loss_fn(model, tokens):
    losses = cross_entropy(model(tokens, 1.5), tokens)
    return jshard.Mean(losses.sum(), losses.size)


def batch(i: int = 0) -> np.ndarray:
    return np.random.default_rng(i).integers(0, V, (EXAMPLES, T))


def tree(state: nnx.State) -> Any:
    return nnx.to_pure_dict(state)


@pytest.mark.slow  # by default, test_linen's transformer
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("layers", "mesh", "remat", "accumulate"),
    [
        ("scan", (2, 4), "full", 1),
        ("scan-remat", (1, 8), "none", 2),
        ("list", (1, 8), "dots", 1),
        ("list", (2, 4), "none", 2),
        ("remat", (2, 2), "none", 1),
    ],
)
def test_training_is_that_of_linen_and_optax_alone(layers, mesh, remat, accumulate):
    module = Transformer(layers)
    policy = jshard.Policy(min_shard_elements=0, remat=remat, accumulate=accumulate)
    fsdp = jshard.FSDP(make_mesh(*mesh), policy)
    state = fsdp.init(wrapped(module), TX)
    step = fsdp.train_step(loss_fn, TX)
    plain = tree(fsdp.fetch(state.params))
    abstract = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, abstract)
    update, opt_state = make_update(TX), jax.jit(TX.init)(plain)

    @jax.jit
    @jax.value_and_grad
    def loss(variables, tokens):
        return cross_entropy(module.apply(variables, tokens, 1.5), tokens).mean()

    for i in range(3):
        state, metrics = step(state, fsdp.shard_batch(batch(i)))
        want, grads = loss(plain, batch(i))
        plain, opt_state = update(grads, opt_state, plain)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-9)
    got = tree(fsdp.fetch(state.params))
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-9 * np.abs(w).max())


def test_of_units_within_units_the_outermost_counts():
    units = (*UNITS, linen.Dense, linen.LayerNorm)
    module = Transformer("list", jnp.float32)
    model = nnx.eval_shape(
        lambda: jshard.linen.Model(module, TOKENS, units=units, rngs=nnx.Rngs(0))
    )
    blocks = {(f"blocks_{i}",) for i in range(LAYERS)}
    assert {*model.unit_paths} == {("embed",), ("norm",)} | blocks


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["list", "scan"])
def test_a_step_gathers_each_layer_by_itself(layers):
    fsdp = jshard.FSDP(make_mesh(1, 8), jshard.Policy(min_shard_elements=0))
    state = fsdp.abstract_state(wrapped(Transformer(layers, jnp.float32)), TX)
    lowered = fsdp.train_step(loss_fn, TX).lower(state, batch())
    found: Counter = Counter()
    for c in hlo.collectives(hlo.compile(lowered).as_text()):
        for array in c.results if c.kind == "all-gather" else c.operands:
            if c.kind != "all-reduce":
                found[c.kind, array.size] += c.times
    expected: Counter = Counter()
    for name, size, layers_of_it in (
        ("kernels", WIDTH * HIDDEN, 2 * LAYERS),
        ("hidden bias", HIDDEN, LAYERS),
        ("bias, scale and bias of the norm", WIDTH, 3 * LAYERS),
    ):
        # Again for the backward, but biases that nothing depends on.
        again = LAYERS if name.startswith("bias") else 0
        expected["all-gather", size] += 2 * layers_of_it - again
        expected["reduce-scatter", size] += layers_of_it
    expected["all-gather", V * WIDTH] += 3  # looked up; as the head, and once more
    expected["reduce-scatter", V * WIDTH] += 2
    for size in (T * WIDTH, WIDTH, WIDTH):  # the root
        expected["all-gather", size] += 1
        expected["reduce-scatter", size] += 1
    assert found == expected


@pytest.mark.slow
def test_weights_that_exist_and_dropout():
    module = Transformer("list", jnp.float32, rate=0.5)
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    params = module.init(keys, TOKENS)["params"]
    model = wrapped(module, params=params, streams=("dropout",))(nnx.Rngs(0))
    assert not np.array_equal(model(batch()), model(batch()))
    fsdp = jshard.FSDP(make_mesh(1, 8), jshard.Policy(min_shard_elements=0))
    state = fsdp.from_model(model, TX)
    got = tree(fsdp.fetch(state.params))["params"]
    jax.tree.map(np.testing.assert_array_equal, got, params)
    step = fsdp.train_step(loss_fn, optax.sgd(0.0))
    state = fsdp.from_model(model, optax.sgd(0.0))
    state, first = step(state, fsdp.shard_batch(batch()))
    _, second = step(state, fsdp.shard_batch(batch()))
    assert first["loss"] != second["loss"]


class WithState(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(x)


class StackedLast(linen.Module):
    @linen.compact
    def __call__(self, x):
        stack = SCAN(
            Scanned,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            in_axes=linen.broadcast,
            length=LAYERS,
        )
        return stack(jnp.float32)(x, jnp.float32(1))[0]


@pytest.mark.parametrize(
    ("module", "units", "message"),
    [
        (WithState(), (linen.BatchNorm,), r"other than parameters \(batch_stats\)"),
        (StackedLast(), (linen.Embed,), "holds Embed, of which StackedLast has no"),
        (StackedLast(), (Block,), "must be stacked along axis 0"),
    ],
)
def test_what_has_no_place_is_one_line(module, units, message):
    with pytest.raises(jshard.UserError, match=message):
        nnx.eval_shape(
            lambda: jshard.linen.Model(
                module, np.zeros((1, T, WIDTH), "f4"), units=units, rngs=nnx.Rngs(0)
            )
        )
