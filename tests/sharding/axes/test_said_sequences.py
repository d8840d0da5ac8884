"""What a mesh splits along the second dimension is said, and no shape tells it.

All arrays have as many examples as tokens, and as many classes. The reference is the
model outside of a mesh, in float64.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity

SIZE, WIDTH = 12, 4  # examples, tokens, classes and words
SEQUENCES = ("tokens", "of.words", "of.mask")
TX = optax.sgd(1.0)
TABLE = np.random.default_rng(2).normal(size=(6, 6))  # on one mesh, as its tokens


class Model(nnx.Module):
    splits_sequences = True
    tensor_split = jshard.nn.Split(columns=("up",), rows=("down",))

    def __init__(self, rngs: nnx.Rngs):
        options: Any = {"use_bias": False, "param_dtype": jnp.float64, "rngs": rngs}
        linear = functools.partial(nnx.Linear, **options)
        self.embed = nnx.Embed(SIZE, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.up, self.down = linear(WIDTH, SIZE), linear(SIZE, WIDTH)
        self.words, self.classes = linear(WIDTH, SIZE), linear(WIDTH, SIZE)

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array, table: jax.Array):
        """Returns logits of words (B, T, V), and of classes (B, C)."""

        def mlp(x: jax.Array, mask: jax.Array, *, table: jax.Array) -> jax.Array:
            scale = jnp.sum(jnp.asarray(table) @ jnp.arange(6.0))
            return self.down(jnp.tanh(self.up(x) * mask[..., None] * scale))

        x_BTD = self.embed(tokens_BT)
        x_BTD += jshard.nn.tensor_parallel(
            mlp, x_BTD, mask_BT, table=table, tokens=("mask",)
        )
        all_BSD = jshard.nn.whole_sequences(x_BTD)
        return self.words(x_BTD), self.classes(jnp.mean(all_BSD, axis=1))


def loss_fn(model: Any, batch: Any) -> Any:
    of, tokens_BT = batch["of"], batch["tokens"]
    words_BTV, classes_BC = model(tokens_BT, of["mask"], TABLE)
    losses_BT = optax.softmax_cross_entropy(words_BTV, of["words"]) * of["mask"]
    losses_B = optax.softmax_cross_entropy(classes_BC, batch["classes"])
    of_words = jshard.Mean(jnp.sum(losses_BT), jnp.sum(of["mask"]))
    return of_words + jshard.Mean(
        jnp.sum(losses_B * batch["rate"]), jnp.sum(batch["rate"])
    )


@functools.cache
def batch() -> dict[str, Any]:
    rng, eye = np.random.default_rng(0), np.eye(SIZE)
    return {
        "tokens": rng.integers(0, SIZE, (SIZE, SIZE)),
        "of": {
            "words": eye[rng.integers(0, SIZE, (SIZE, SIZE))],
            "mask": 1.0 * (rng.random((SIZE, SIZE)) > 0.3),
        },
        "classes": eye[rng.integers(0, SIZE, SIZE)],
        "rate": rng.random(SIZE),
    }


@functools.cache
def made() -> Model:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    return nnx.merge(graphdef, params)


def step(mesh: Any) -> tuple[float, dict]:
    """The loss, and parameters after a step."""
    policy = jshard.Policy(min_shard_elements=0)
    units = (nnx.Linear, nnx.Embed)
    fsdp = jshard.FSDP(mesh, policy, units=units, sequences=SEQUENCES)
    state, train_step = fsdp.from_model(made(), TX), fsdp.train_step(loss_fn, TX)
    state, metrics = train_step(state, fsdp.shard_batch(batch()))
    return float(metrics["loss"]), parity.by_path(fsdp.fetch(state.params))


@functools.cache
def plain() -> tuple[float, dict]:
    graphdef, params = nnx.split(made())

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), batch()).compute()

    value, grads = loss(params)
    stepped = jax.tree.map(lambda p, g: np.asarray(p) - np.asarray(g), params, grads)
    return float(value), parity.by_path(stepped)


@pytest.mark.quick("sizes0", "sizes3")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 2, "fsdp": 2},
        {"context": 3},
        {"context": 4},
        {"tensor": 2, "fsdp": 2},
        {"tensor": 3},
        {"tensor": 4},
        {"tensor": 2, "context": 2},
        {},
    ],
)
def test_one_hot_labels_masks_and_rates_of_a_sequences_length_are_what_they_are(sizes):
    sizes = {"fsdp": 1} | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    loss, params = step(jshard.make_mesh(**sizes, devices=devices))
    want, stepped = plain()
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    assert parity.worst(params, stepped) <= 1e-9


def refused(batch: Any, sequences: Any, **mesh: int) -> str:
    made: Any = jshard.make_mesh(**mesh)  # pyright: ignore
    with pytest.raises(jshard.UserError) as error:
        jshard.FSDP(made, sequences=sequences).shard_batch(batch)
    return str(error.value)


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_a_batch_in_which_several_arrays_may_be_sequences_is_refused(axis):
    arrays = {"x": np.zeros((8, 24, 3)), "y": np.zeros((8, 24)), "z": np.zeros(8)}
    assert refused(arrays, None, **{axis: 2}) == (
        f"batch: the mesh's {axis}=2 splits sequences, and 'x' [8, 24, 3], 'y' [8, 24] "
        "may be some: name those that are, jshard.FSDP(sequences=('x', ...)), or in a "
        "recipe sequences(config)"
    )
    jshard.FSDP(jshard.make_mesh()).shard_batch(arrays)
    sizes: Any = {axis: 2}
    alone = jshard.FSDP(jshard.make_mesh(**sizes))
    got = alone.shard_batch({"x": arrays["x"], "z": arrays["z"]})
    assert got["x"].sharding.shard_shape((8, 24, 3)) == (2, 12, 3)
    whole = alone.shard_examples(arrays)
    assert whole["y"].addressable_shards[0].data.shape == (1, 24)


def test_names_that_are_wrong_are_refused_in_one_line():
    arrays = {"x": np.zeros((8, 24)), "of": {"y": np.zeros((8, 9))}, "z": np.zeros(8)}
    assert refused(arrays, ("X",), context=2) == (
        "sequences=('X',): the batch has no 'X'; it has 'of.y' [8, 9], 'x' [8, 24]"
    )
    assert "'z' [8] has no second dimension" in refused(arrays, ("x", "z"), context=2)
    assert refused(arrays, ("of",), context=2) == (
        "batch: the sequence 'of.y' [8, 9] has a length that is not divisible by the "
        "mesh's context=2"
    )
    for names in ("inputs", (1,)):
        assert "give names of a batch's arrays" in refused(arrays, names, context=2)
    fsdp = jshard.FSDP(jshard.make_mesh(context=2), sequences=("x", "absent"))
    fsdp.shard_batch({"x": arrays["x"], "z": arrays["z"]})  # all that may be is named
