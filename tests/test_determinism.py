"""The same seed gives the same run; no draw depends on the mesh unless it says so."""

import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.models.gpt import GPT, GPTConfig

MESHES = ((1, 1), (1, 2), (1, 8), (2, 4), (4, 2), (8, 1))  # replica, fsdp
EXAMPLES, WIDTH, LAYERS, STEPS = 16, 16, 2, 2
BITS = 2.0 ** np.arange(WIDTH)  # 16 mask values as a number, exact in fp32


def make_fsdp(
    replica: int, shards: int, *, units: tuple[type, ...] = (), **knobs: Any
) -> jshard.FSDP:
    devices = jax.devices()[: replica * shards]
    mesh = jshard.make_mesh(replica=replica, fsdp=shards, devices=devices)
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    return jshard.FSDP(mesh, policy, units=units)


class Dropped(nnx.Module):
    """A linear layer, and the mask of its dropout as a number for each example."""

    def __init__(self, dropout: type, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = self.dropout(jnp.ones_like(x)) > 0
        return self.linear(x), kept @ BITS


class Masks(nnx.Module):
    """Dropout in a Stack, a Unit, a list of layers and the root."""

    def __init__(self, dropout: type, rngs: nnx.Rngs):
        self.stack = jshard.Stack(lambda r: Dropped(dropout, r), LAYERS, rngs=rngs)
        self.unit = jshard.Unit(Dropped(dropout, rngs))
        self.list = nnx.List([Dropped(dropout, rngs) for _ in range(2)])
        self.dropout = dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        x, stacked = self.stack(x)
        masks = [*stacked]
        for layer in (self.unit, *self.list):
            x, mask = layer(x)
            masks.append(mask)
        return x, [*masks, (self.dropout(jnp.ones_like(x)) > 0) @ BITS]


def masked(dropout: type) -> Masks:
    return filled(lambda: Masks(dropout, nnx.Rngs(0)))


BATCH = {
    "x": np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH), np.float32),
    "is": np.eye(EXAMPLES, dtype=np.float32),  # which example a row is
}


def loss_fn(model, batch):
    """Shows the masks as metrics: one named mean for each mask and example."""
    x, masks = model(batch["x"])
    totals, counts = jnp.stack(masks) @ batch["is"], jnp.sum(batch["is"], axis=0)
    seen = {
        f"{i} {example}": jshard.Mean(totals[i, example], counts[example])
        for i in range(len(masks))
        for example in range(EXAMPLES)
    }
    return jshard.Mean(jnp.sum(x**2), x.size), seen


def masks_of(fsdp: jshard.FSDP, dropout: type = jshard.Dropout) -> np.ndarray:
    """The masks of a run as numbers: (steps, places, examples)."""
    optimizer = optax.sgd(0.0)
    state = fsdp.from_model(masked(dropout), optimizer)
    step = fsdp.train_step(loss_fn, optimizer)
    batch, seen = fsdp.shard_batch(BATCH), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        row = [float(v) for k, v in sorted_masks(metrics)]
        seen.append(np.reshape(row, (-1, EXAMPLES)))
    return np.array(seen)


def sorted_masks(metrics: dict[str, Any]) -> list[tuple[list[int], Any]]:
    pairs = [(k, v) for k, v in metrics.items() if k not in ("loss", "grad_norm")]
    return sorted(([int(part) for part in k.split()], v) for k, v in pairs)


@pytest.fixture(scope="module")
def plain_masks() -> np.ndarray:
    """The masks of the same model without jshard."""
    model = masked(jshard.Dropout)
    run = nnx.jit(lambda model, x: model(x)[1])
    return np.array([run(model, BATCH["x"]) for _ in range(STEPS)])


@pytest.mark.slow  # by default, nn/test_dropout_masks
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [((1, 1), 1), ((1, 8), 2), ((2, 4), 2)],
    ids=str,
)
def test_dropout_masks_are_those_of_the_plain_model(plain_masks, mesh, accumulate):
    fsdp = make_fsdp(*mesh, units=(Dropped,), accumulate=accumulate)
    np.testing.assert_array_equal(masks_of(fsdp), plain_masks)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_dropout_masks_are_the_same_on_every_mesh_and_accumulation(
    plain_masks, mesh, accumulate
):
    fsdp = make_fsdp(*mesh, units=(Dropped,), accumulate=accumulate)
    np.testing.assert_array_equal(masks_of(fsdp), plain_masks)


def test_every_step_place_and_example_has_a_mask_of_its_own(plain_masks):
    # 2 x 6 x 16 masks of 16 bits: by chance one or two pairs agree, never many.
    assert plain_masks.shape == (STEPS, LAYERS + 4, EXAMPLES)
    assert len(np.unique(plain_masks)) > plain_masks.size - 6


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_two_devices_or_micro_batches_share_a_plain_nnx_mask(accumulate):
    masks = masks_of(
        make_fsdp(2, 4, units=(Dropped,), accumulate=accumulate), nnx.Dropout
    )
    blocks = masks.reshape(STEPS, LAYERS + 4, 8 * accumulate, -1)
    for step, place in itertools.product(*map(range, blocks.shape[:2])):
        assert len({block.tobytes() for block in blocks[step, place]}) == 8 * accumulate
    assert not np.any(masks[0] == masks[1], axis=1).all()


@pytest.mark.slow
def test_evaluation_drops_nothing_and_leaves_the_state_as_it_is():
    fsdp = make_fsdp(1, 8, units=(Dropped,))
    state = fsdp.init(lambda rngs: Masks(jshard.Dropout, rngs), optax.sgd(0.1))
    before = fsdp.fetch(state)
    means = fsdp.eval_step(loss_fn)(state, fsdp.shard_batch(BATCH)).compute()
    assert {means[f"{i} {i}"] for i in range(LAYERS + 4)} == {BITS.sum()}
    chex.assert_trees_all_equal(fsdp.fetch(state), before)


CONFIG = GPTConfig(
    vocab_size=40,
    sequence_length=8,
    num_layers=1,
    num_heads=2,
    width=16,
    dropout=0.1,
    loss_chunk=16,
    tied=False,
)


def make_gpt(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs=rngs)


class Layers(nnx.Module):
    """Random numbers before and while it is trained."""

    def __init__(self, rngs: nnx.Rngs):
        layer = lambda rngs: Dropped(nnx.Dropout, rngs)
        self.layers = jshard.Stack(layer, LAYERS, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, masks = self.layers(x)
        return x * jnp.mean(masks, axis=0)[:, None], masks


def train(fsdp: jshard.FSDP) -> tuple[Any, list]:
    rng = np.random.default_rng(0)
    optimizer = optax.sgd(1e-2, momentum=0.9)
    state = fsdp.init(Layers, optimizer, seed=3)
    step = fsdp.train_step(
        lambda model, x: jshard.Mean(jnp.sum(model(x)[0]), x.size), optimizer
    )
    metrics = []
    for _ in range(3):
        batch = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
        state, values = step(state, fsdp.shard_batch(batch))
        metrics.append(jax.device_get(values))
    return fsdp.fetch(state), metrics


@pytest.mark.slow  # test_going_on.py has equal runs
def test_the_same_seed_gives_bitwise_the_same_run_twice(compiled_once):
    first, second = (train(make_fsdp(2, 4, accumulate=2)) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


class Unlike(nnx.Module):
    """Initial values of a Stack, a Unit and the root."""

    def __init__(self, rngs: nnx.Rngs):
        layer = lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.embed = jshard.Unit(nnx.Embed(40, WIDTH, rngs=rngs))
        self.stack = jshard.Stack(layer, LAYERS, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)


@pytest.mark.slow  # test_padding.py has two meshes
def test_initial_values_are_identical_on_every_mesh_and_those_of_the_plain_model():
    def initial(replica: int, shards: int) -> Any:
        fsdp = make_fsdp(replica, shards)
        return fsdp.fetch(fsdp.init(Unlike, optax.sgd(1.0), seed=3))

    one = initial(1, 1)
    chex.assert_trees_all_equal(initial(2, 4), one)
    # In another program initialisers may round differently: a few last places.
    plain = jax.jit(lambda: nnx.state(Unlike(nnx.Rngs(3)), nnx.Param))()
    chex.assert_trees_all_close(one.params, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_another_seed_gives_other_values():
    fsdp = make_fsdp(1, 8)
    one, two = (
        fsdp.fetch(fsdp.init(make_gpt, optax.sgd(1.0), seed=seed).params)
        for seed in (0, 1)
    )
    assert not np.allclose(
        one["embed"]["embedding"].get_value(), two["embed"]["embedding"].get_value()
    )
