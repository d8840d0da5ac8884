"""Heads and features split over devices: `make_mesh(tensor=)`.

The reference is the model as an ordinary Flax module, on one device, with JAX and optax
alone, in float64.
"""

from itertools import product
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
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.t5 import T5, T5Config
from jshard.models.vit import ViT, ViTConfig
from jshard.plan.cost.traffic import count
from jshard.plan.hlo import parse
from split_models import (
    MODELS,
    SEQUENCES,
    TIME,
    batch,
    compiled,
    exchanged,
    loss_fn,
    start,
    trains_alike,
)

CASES = {
    "llama": ("llama", True, "adamw", {"tensor": 2, "accumulate": 2}),
    "gpt with dropout": ("gpt", True, "adamw", {"tensor": 4, "accumulate": 2}),
    "all axes": (
        "untied",
        True,
        "adamw",
        {"tensor": 2, "context": 2, "replica": 2},
    ),
    "tensor alone": ("llama", False, "sgd", {"tensor": 2, "fsdp": 1, "devices": 2}),
    "three devices": (
        "three heads",
        False,
        "adamw",
        {"tensor": 3, "fsdp": 1, "devices": 3},
    ),
    "hybrid": ("llama", True, "muon", {"tensor": 2, "replica": 2, "remat": "dots"}),
    "windows": (
        "windows",
        True,
        "adamw",
        {"tensor": 2, "context": 2, "prefetch": True},
    ),
    "fused": ("fused", True, "adamw", {"tensor": 2, "remat": "none"}),
    "tiles": ("tiles", False, "adamw", {"tensor": 2, "remat": "attention"}),
    "gpt-oss": ("gpt-oss", True, "adamw", {"tensor": 2, "context": 2}),
    "deepseek": ("deepseek", False, "adamw", {"tensor": 2, "context": 2}),
    "gemma": ("gemma", True, "adamw", {"tensor": 2}),
    "glm": ("glm", True, "adamw", {"tensor": 2, "expert": 2}),
    "joint norms": ("joint norms", False, "adamw", {"tensor": 2}),
    "odd vocabulary": (
        "odd vocabulary",
        True,
        "adamw",
        {"tensor": 2, "replica": 2, "prefetch": True},
    ),
    "odd and capped": ("odd and capped", False, "lamb", {"tensor": 2}),
    "deferred": (
        "llama",
        False,
        "adamw",
        {"tensor": 2, "accumulate": 2, "defer_scatter": True},
    ),
    "groups": ("llama", False, "adamw", {"tensor": 2, "reshard_after_forward": 2}),
    "no reshard": (
        "gpt",
        False,
        "adamw",
        {"tensor": 2, "reshard_after_forward": False, "unroll": True},
    ),
}


@pytest.mark.slow  # "all at once" of test_expert_models.py, and test_each_axis.py
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_features_train_as_whole_ones_on_one_device(case):
    trains_alike(*case)


@pytest.mark.slow  # test_split_columns_and_rows_compute_and_learn_as_whole_ones
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [{"tensor": 2}, {"tensor": 2, "context": 2, "remat": "none"}],
    ids=["tensor", "both"],
)
def test_exchanges_in_parts_of_the_examples_compute_the_same(options, monkeypatch):
    monkeypatch.setattr("jshard.sharding.axes.tensor.on_gpus", lambda: True)
    trains_alike("windows", True, "adamw", options)


@pytest.mark.usefixtures("x64")
def test_a_layer_exchanges_tokens_twice_a_pass_and_gathers_its_own_part():
    found = exchanged("untied llama", tensor=2, remat="none")
    layers, rows, width, vocabulary = 2, 2, 16, 40
    tokens = rows * TIME * width * 8 // 2  # received from the other device
    # Attention and MLP: tokens in and out, and in the backward the other way. The loss
    # gathers features and, on the way, targets and weights, in two chunks.
    exchanges = layers * 2 * 2
    split = 2 * (16 * 16) + 2 * (16 * 8) + 3 * (16 * 32)  # a layer's matrices
    own = layers * split * 8 // 2 * 3 // 4  # a half of them, of which 3/4 arrive
    head = width * vocabulary * 8 // 2 * 3 // 4
    norms = (layers * 2 + 1) * width * 8 * 7 // 8
    gathers = found["all-gather", "float64"]
    rows_and_weights = tokens + rows * TIME * 8 // 2
    assert gathers.wire_bytes == (
        exchanges * tokens + rows_and_weights + 2 * own + head + 2 * norms - 16 * 7
    )


@pytest.mark.usefixtures("x64")
def test_norms_are_sent_with_the_matrices_that_the_axis_splits():
    """None is gathered or scattered over all eight devices, beside those over four."""
    program = parse(compiled("untied llama", tensor=2).as_text())
    moved = {(row.kind, row.group) for row in count(program, 8, None)}
    kinds = "all-gather", "reduce-scatter"
    assert {x for x in moved if x[0] in kinds} == {*product(kinds, (2, 4))}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_axis_costs_no_memory_of_the_state():
    def bytes_a_device(**mesh):
        _, state, _ = start("untied", **mesh)
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return sum(x.addressable_shards[0].data.nbytes for x in leaves)

    assert bytes_a_device(tensor=4) == bytes_a_device(fsdp=8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
def test_checkpoints_go_from_any_mesh_to_any_other_bit_for_bit(tmp_path):
    fsdp, state, train_step = start("gpt in float32")
    state, _ = train_step(state, fsdp.shard_batch(batch(False, 0)))
    want = fsdp.fetch(state)
    meshes = [
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"fsdp": 4, "devices": jax.devices()[:4]},
        {"fsdp": 1, "tensor": 4, "replica": 2},
        {"pipe": 2, "tensor": 2},
    ]
    for number, mesh in enumerate(meshes):
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(state)
        other, abstract, _ = start("gpt in float32", **mesh)
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            state = checkpointer.restore(abstract)
        jax.tree.map(np.testing.assert_array_equal, other.fetch(state), want)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
def test_predictions_have_whole_sequences_and_weights():
    def logits(**mesh):
        fsdp, state, _ = start("untied llama", **mesh)
        predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
        examples = fsdp.shard_examples({"inputs": batch(False, 0)["inputs"]})
        return fsdp.fetch(predict(state, examples))

    whole = logits()
    np.testing.assert_allclose(logits(tensor=2, context=2), whole, rtol=1e-9)
    np.testing.assert_allclose(logits(tensor=2, pipe=2), whole, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_logits_of_a_split_head_are_those_of_the_whole_head():
    def loss(**mesh):
        fsdp, state, _ = start("untied llama", **mesh)

        def of_logits(model, batch):
            logits_BTV = model(batch["inputs"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits_BTV, batch["targets"]
            )
            return jshard.Mean(
                jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])
            )

        evaluate = fsdp.eval_step(of_logits)
        return evaluate(state, fsdp.shard_batch(batch(False, 0))).compute()["loss"]

    assert loss(tensor=2, context=2) == pytest.approx(loss(), rel=1e-12)


class Attention(nnx.Module):
    """Somebody's attention, which takes the number of heads from its input."""

    def __init__(self, rngs):
        self.query, self.key, self.value = (
            nnx.LinearGeneral(
                16, (4, 8), use_bias=False, param_dtype=jnp.float64, rngs=rngs
            )
            for _ in range(3)
        )
        self.out = nnx.LinearGeneral(
            (4, 8), 16, axis=(-2, -1), param_dtype=jnp.float64, rngs=rngs
        )

    def __call__(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return self.out(y)


class Foreign(nnx.Module):
    """Somebody's block, without a word about jshard."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, param_dtype=jnp.float64, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(16, 32, param_dtype=jnp.float64, rngs=rngs),
            jax.nn.gelu,
            nnx.Linear(32, 16, param_dtype=jnp.float64, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class ForeignModel(nnx.Module):
    splits_sequences = True

    def __init__(self, rngs):
        self.blocks = jshard.Stack(Foreign, 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x)


HEADS = {"query.kernel": -2, "key.kernel": -2, "value.kernel": -2, "out.kernel": -3}
SPLITS = {
    "blocks.attention": jshard.nn.Split(rows=("out.bias",), dims=HEADS),
    "blocks.mlp": jshard.nn.Split(columns=("layers.0",), rows=("layers.2",)),
}


@pytest.mark.usefixtures("x64")
def test_modules_named_by_path_are_split_without_an_edit():
    def squares(model, batch):
        return jshard.Mean(jnp.sum((model(batch["x"]) - 1) ** 2), batch["x"].size)

    x = np.random.default_rng(0).normal(size=(8, 12, 16))
    model = filled(lambda: ForeignModel(nnx.Rngs(0)))

    fsdp = jshard.FSDP(jshard.make_mesh(tensor=4), tensor_splits=SPLITS)
    tx = optax.sgd(1.0)
    state, step = fsdp.from_model(model, tx), fsdp.train_step(squares, tx)
    graphdef, params = nnx.split(model)

    @jax.jit
    @jax.value_and_grad
    def whole(params):
        return squares(nnx.merge(graphdef, params), {"x": x}).compute()

    for _ in range(2):
        state, metrics = step(state, fsdp.shard_batch({"x": x}))
        loss, grads = whole(params)
        params = jax.tree.map(lambda p, g: np.subtract(p, g), params, grads)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-9)
    found = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(found, parity.by_path(params)) <= 1e-9


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (None, "tensor=2, but ForeignModel declares nothing that this axis splits"),
        ({"blocks.mpl": jshard.nn.Split()}, "no module 'blocks.mpl'; it has blocks, "),
        ({"blocks": jshard.nn.Split()}, "'blocks' is a Stack or a Unit"),
        (
            {"blocks.mlp": jshard.nn.Split(columns=("layers.7",))},
            "'blocks.mlp' has no parameters at 'layers.7'",
        ),
        (
            {"blocks.mlp": jshard.nn.Split(columns=("layers.0",), counts={"heads": 3})},
            "tensor=2 does not divide heads=3 of 'blocks.mlp'",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused_in_one_line(splits, message):
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2), tensor_splits=splits)
    with pytest.raises(jshard.UserError, match=message):
        fsdp.abstract_state(ForeignModel, optax.sgd(0.1))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        ("three heads", {"tensor": 2}, "tensor=2 does not divide num_heads=3 of "),
        ("untied", {"tensor": 8}, "tensor=8 does not divide num_heads=4 of "),
        ("gpt", {"tensor": 2, "expert": 2}, "expert=2, but GPT declares nothing"),
    ],
)
def test_models_that_do_not_divide_are_refused_in_one_line(model, mesh, message):
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh))
    with pytest.raises(jshard.UserError, match=message):
        fsdp.abstract_state(MODELS[model], optax.sgd(0.1))


def test_fused_projections_in_float8_are_refused_in_one_line():
    config = GPTConfig(
        vocab_size=64, sequence_length=8, num_layers=1, num_heads=2, width=128
    )
    policy = jshard.Policy(precision=jshard.Precision(products="float8"))
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2), policy, sequences=SEQUENCES)
    make, tx = (lambda rngs: GPT(config, rngs=rngs)), optax.sgd(0.1)
    tokens = {"inputs": np.zeros((4, 8), int), "targets": np.zeros((4, 8), int)}
    examples = fsdp.shard_batch(tokens | {"weights": np.ones((4, 8))})
    step = fsdp.train_step(loss_fn, tx)
    with pytest.raises(jshard.UserError, match=r"tensor=2 divides .* products=None"):
        step.trace(fsdp.abstract_state(make, tx), examples)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_t5_and_vit_say_why_their_sequences_stay_whole(axis):
    models = {
        "T5": lambda rngs: T5(T5Config(num_layers=1, width=16), rngs=rngs),
        "ViT": lambda rngs: ViT(ViTConfig(num_layers=1, width=24), rngs=rngs),
    }
    sizes: Any = {axis: 2}
    fsdp = jshard.FSDP(jshard.make_mesh(**sizes))
    for name, make in models.items():
        message = f"{axis}=2 is not for {name}: .*; use more devices of fsdp"
        with pytest.raises(jshard.UserError, match=message):
            fsdp.abstract_state(make, optax.sgd(0.1))
