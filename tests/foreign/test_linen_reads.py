"""Linen models that read parameters outside of the unit that owns them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jshard
from compare import BOUND, EXAMPLES, STEPS
from filled import filled
from parity import make_mesh, make_update

pytestmark = pytest.mark.usefixtures("x64")

V, T, WIDTH, LAYERS = 11, 6, 24, 2
WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
TX = optax.sgd(0.1, momentum=0.9)
TOKENS = np.zeros((1, T), int)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.tanh(linen.Dense(WIDTH, **WIDE)(x))


class Layer(linen.Module):
    """What nn.scan takes: with the parameters of its block read in the loop, or not."""

    reads: bool = False

    @linen.compact
    def __call__(self, x, _):
        block = Block(name="block")
        x = block(x)
        if self.reads:
            x = x + sum_of_squares(block)
        return x, None


def sum_of_squares(module: linen.Module) -> jax.Array:
    return sum(map(jnp.sum, jax.tree.map(jnp.square, leaves_of(module))), jnp.zeros(()))


def leaves_of(module: linen.Module) -> list[jax.Array]:
    return jax.tree.leaves(module.variables["params"])


class Transformer(linen.Module):
    """A tied head, as in ``x @ embed.embedding.T``, and weight decay in the model."""

    decay: bool = False
    scanned: bool = False
    reads: bool = False  # in the loop

    def setup(self):
        self.embed = linen.Embed(V, WIDTH, **WIDE)
        if self.scanned:
            scan: Any = linen.scan
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            self.blocks: Any = scan(Layer, length=LAYERS, **split)(self.reads)
        else:
            layer = linen.remat(Block) if self.decay else Block
            self.blocks = [layer() for _ in range(LAYERS)]

    def __call__(self, tokens_BT):
        x = self.embed(tokens_BT)
        if self.scanned:
            x, _ = self.blocks(x, None)
        else:
            for block in self.blocks:
                x = block(x)
        logits_BTV = x @ self.embed.embedding.T
        if not self.decay:
            return logits_BTV
        blocks = [self.blocks] if self.scanned else self.blocks
        return logits_BTV * sum(map(sum_of_squares, blocks))


def wrapped(module: linen.Module) -> Any:
    return lambda rngs: jshard.linen.Model(
        module, TOKENS, units=(Block, linen.Embed), rngs=rngs
    )


def losses_of(logits, tokens):
    targets = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def loss_fn(model, tokens):
    losses = losses_of(model(tokens), tokens)
    return jshard.Mean(losses.sum(), losses.size)


def fsdp_of(mesh: tuple[int, int]) -> jshard.FSDP:
    return jshard.FSDP(make_mesh(*mesh), jshard.Policy(min_shard_elements=0))


@pytest.mark.quick("mesh0-decay")
@pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit")
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Transformer(), id="tied"),
        pytest.param(Transformer(decay=True), id="decay"),
        pytest.param(Transformer(scanned=True), id="scanned"),
    ],
)
@pytest.mark.parametrize("mesh", [(2, 2), (1, 8), (1, 3), (1, 1)])
def test_what_is_read_outside_of_its_unit_is_the_full_value(mesh, module):
    fsdp = fsdp_of(mesh)
    state = fsdp.from_model(filled(lambda: wrapped(module)(nnx.Rngs(0))), TX)
    step = fsdp.train_step(loss_fn, TX)
    plain = nnx.to_pure_dict(fsdp.fetch(state.params))
    update, opt_state = make_update(TX), jax.jit(TX.init)(plain)

    @jax.jit
    @jax.value_and_grad
    def loss(variables, tokens):
        return losses_of(module.apply(variables, tokens), tokens).mean()

    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, V, (EXAMPLES, T))
        state, metrics = step(state, fsdp.shard_batch(tokens))
        want, grads = loss(plain, tokens)
        plain, opt_state = update(grads, opt_state, plain)
        np.testing.assert_allclose(metrics["loss"], want, rtol=BOUND)
    got = nnx.to_pure_dict(fsdp.fetch(state.params))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=BOUND * np.abs(w).max())


def test_a_warning_names_what_is_read_outside_and_nothing_else():
    fsdp = fsdp_of((1, 8))
    state = fsdp.abstract_state(wrapped(Transformer()), TX)
    step = fsdp.train_step(loss_fn, TX)
    with pytest.warns(UserWarning, match="is read outside") as warned:
        step.lower(state, np.zeros((EXAMPLES, T), int))
    (message,) = {str(warning.message) for warning in warned}
    assert message.startswith("parameter 'params.embed.embedding' is read outside of")


@pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit")
@pytest.mark.parametrize(("decay", "reads"), [(True, False), (False, True)])
def test_a_scanned_layer_read_outside_of_its_unit_is_an_error_that_names_it(
    decay, reads
):
    fsdp = fsdp_of((1, 8))
    module = Transformer(decay, scanned=True, reads=reads)
    state = fsdp.abstract_state(wrapped(module), TX)
    step = fsdp.train_step(loss_fn, TX)
    named = r"parameter 'blocks\.block\.Dense_0\.bias', stacked by nn.scan, is read"
    with pytest.raises(jshard.UserError, match=named):
        step.lower(state, np.zeros((EXAMPLES, T), int))
