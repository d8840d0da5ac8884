"""models/bert.py and train/bert.py: the encoder, and the masks it is trained on.

That the encoder is that of transformers is in tests/huggingface.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from filled import filled
from jshard.models.bert import Bert, BertConfig
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.recipes import bert
from jshard.training.trainer import Trainer, fit_since
from tiny_runs import read_metrics

V, T, M = 40, 8, 4
SMALL = BertConfig(
    vocab_size=V,
    sequence_length=T,
    num_layers=2,
    num_heads=4,
    width=16,
    hidden=24,
    loss_chunk=8,
    attention="blockwise",  # the others have their softmax in float32
)


def make_model(**options: Any) -> Bert:
    """A model in float64 whose parameters are all random, and not small."""
    options = {"dtype": jnp.float64, "param_dtype": jnp.float64, **options}
    config = dataclasses.replace(SMALL, **options)
    return filled(lambda: Bert(config, rngs=nnx.Rngs(0)))


def batch(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, T + 1, (rows, 1))
    real = np.arange(T) < lengths
    return {
        "inputs": np.where(real, rng.integers(0, V, (rows, T)), 0),
        "places": rng.integers(0, lengths, (rows, M)),
        "targets": rng.integers(0, V, (rows, M)),
        "weights": (rng.random((rows, M)) < 0.7) * 1.0,
        "segment_ids": real.astype(np.int32),
    }


@pytest.mark.slow  # by default, that of test_decoder_family
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize(
    "mesh",
    [{}, {"replica": 2}, {"tensor": 2}, {"context": 2, "tensor": 2}],
    ids=["fsdp", "replicas", "tensor", "context and tensor"],
)
def test_a_sharded_run_follows_one_device(x64, mesh, remat):
    rows, tx, model = batch(16), optax.sgd(0.1), make_model()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    losses = []

    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(params):  # without jshard around it
        return bert.loss_fn(nnx.merge(graphdef, params, rest), rows).compute()

    for _ in range(2):
        value, grads = loss_and_grads(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(value)

    policy = jshard.Policy(min_shard_elements=0, remat=remat)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy, sequences=tuple(rows))
    state, step = fsdp.from_model(model, tx), fsdp.train_step(bert.loss_fn, tx)
    for want in losses:
        state, metrics = step(state, fsdp.shard_batch(rows))
        assert parity.error(metrics["loss"], want) <= 1e-9
    got = fsdp.fetch(state.params)
    errors = jax.tree.map(parity.error, nnx.to_pure_dict(got), nnx.to_pure_dict(params))
    assert max(jax.tree.leaves(errors)) <= 1e-9


def test_padding_is_not_seen_and_the_loss_is_that_of_the_logits(x64):
    model, rows = make_model(pooler=True), batch(4)
    ids = rows["segment_ids"]

    @jax.jit
    def outputs(tokens):  # logits, and the first token's features
        return [f(tokens, segment_ids_BT=ids) for f in (model, model.pooled)]

    logits, _ = outputs(rows["inputs"])
    assert logits.shape == (4, T, V)
    other: Any = np.where(ids > 0, rows["inputs"], 7)
    for want, got in zip(outputs(rows["inputs"]), outputs(other), strict=True):
        real = ids > 0 if want.ndim == 3 else slice(None)
        np.testing.assert_array_equal(got[real], want[real])

    chosen = jnp.take_along_axis(logits, rows["places"][..., None], axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(chosen, rows["targets"])
    mean = jax.jit(bert.loss_fn)(model, rows)
    assert parity.error(mean.total, jnp.sum(losses * rows["weights"])) <= 1e-12
    assert mean.count == rows["weights"].sum()


def config_of(recipe: Any, **keys: Any) -> Any:
    return make_config(recipe, keys)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("to be, or not to be, that is the question: " * 400)
    return file


def test_masks_depend_on_the_seed_and_the_example_alone(text):
    keys = {"data.path": text, "model.sequence_length": 40, "data.mask_rate": 0.15}
    with open_recipe(find_recipe("bert.py")) as recipe:
        config = config_of(recipe, **keys)
        train, same = (recipe.make_data(config, "train") for _ in range(2))
        other = recipe.make_data(config_of(recipe, **keys, seed=1), "train")
        held_out = recipe.make_data(config, "validation")
        plain: Any = bert.gpt.make_data(config, "train")
    n = 500  # epochs and more
    kinds = np.zeros(3)
    for i in range(n):
        example, before = train[i], plain[i]["inputs"]
        jax.tree.map(np.testing.assert_array_equal, example, same[i])
        chosen, after = example["places"], example["inputs"]
        assert len(set(chosen)) == 6
        np.testing.assert_array_equal(example["targets"], before[chosen])
        assert set(np.flatnonzero(before != after)) <= set(chosen)
        masked, kept = after[chosen] == 256, after[chosen] == before[chosen]
        kinds += [masked.sum(), kept.sum(), (~masked & ~kept).sum()]
    np.testing.assert_allclose(kinds / kinds.sum(), [0.8, 0.1, 0.1], atol=0.03)
    first, second = ([x[i]["places"] for i in range(20)] for x in (train, other))
    assert not np.array_equal(first, second)
    last = held_out[len(held_out) - 1]
    assert set(last["segment_ids"]) == {0, 1}
    assert last["weights"].sum() < 6
    assert np.all(last["segment_ids"][last["places"]] == 1)


def test_masks_of_packed_rows_leave_out_padding_and_ends():
    example = {
        "inputs": np.array([5, 0, 6, 7, 0, 0], np.int32),
        "weights": np.ones(6, np.float32),
        "segment_ids": np.array([1, 1, 2, 2, 2, 0], np.int32),
        "positions": np.array([0, 1, 0, 1, 2, 0], np.int32),
    }
    found = bert.masked(
        example,
        np.random.default_rng(0),
        rate=0.9,
        mask_token=9,
        vocab_size=10,
        special=[0],
        padded=False,
    )
    np.testing.assert_array_equal(found["weights"], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(found["targets"], [5, 6, 7, 0, 0])
    for name in ("segment_ids", "positions"):
        np.testing.assert_array_equal(found[name], example[name])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model.vocab_size": 256},
            "256 is not below model.vocab_size=256",
        ),
        ({"data.mask_token": 300}, "300 is not below model.vocab_size=257"),
    ],
)
def test_a_mask_token_beyond_the_vocabulary_is_a_users_error(text, keys, message):
    with open_recipe(find_recipe("bert.py")) as recipe:
        config = config_of(recipe, **keys, **{"data.path": text})
        with pytest.raises(jshard.UserError, match=message):
            recipe.make_data(config, "train")


def test_sizes_that_do_not_fit_are_a_users_error():
    with pytest.raises(jshard.UserError, match="width=16 is not divisible by"):
        dataclasses.replace(SMALL, num_heads=3)
    with pytest.raises(jshard.UserError, match="activation='silu' is unknown: use"):
        dataclasses.replace(SMALL, activation="silu")


@pytest.mark.slow
def test_the_recipe_learns_on_every_mesh_alike(text, tmp_path):
    keys = {
        "data.path": text,
        "steps": 30,
        "batch_size": 16,
        "log_every": 1,
        "eval_every": 30,
        "model.sequence_length": 40,
        "model.num_layers": 2,
        "model.width": 32,
        "model.hidden": 64,
        "policy.min_shard_elements": 0,
        "policy.remat": "full",
    }
    losses = []
    for replica, pack in ((1, False), (2, False), (1, True)):
        folder = tmp_path / f"{replica}-{pack}"
        more = {"mesh.replica": replica, "data.pack": pack}
        with open_recipe(find_recipe("bert.py")) as recipe:
            given = config_of(recipe, **keys, **more)
            trainer = Trainer(recipe, config=given, workdir=folder)
            fit_since(trainer, keeps_state=False)
        lines = read_metrics(folder)
        losses.append([line["loss"] for line in lines if "loss" in line])
        assert losses[-1][-1] < 0.7 * losses[-1][0]
        assert [line for line in lines if "eval_loss" in line]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
