"""RegNet, ResNet and ViT: exact on every mesh, batch statistics included."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.models.images import classification_loss, normalize
from jshard.models.regnet import RegNet, RegNetConfig
from jshard.models.resnet import ResNet, ResNetConfig
from jshard.models.vit import ViT, ViTConfig
from parity import make_mesh, make_update

CLASSES, SIZE, STEPS = 5, 16, 2
TX = optax.sgd(0.05, momentum=0.9)
SMALL: dict[str, Any] = {"stem": 8, "depths": (1, 1), "widths": (16, 32)}
# Not `float`, which promotes weakly: batch statistics would be float32.
TYPES: dict[str, Any] = {"dtype": jnp.float64, "param_dtype": jnp.float64}
MODELS = {
    "regnet": lambda **types: (
        RegNet,
        RegNetConfig(
            stem=8, depths=(1,), widths=(16,), group_width=8, classes=CLASSES, **types
        ),
    ),
    "resnet": lambda **types: (ResNet, ResNetConfig(**SMALL, classes=CLASSES, **types)),
    "vit": lambda **types: (
        ViT,
        ViTConfig(
            image_size=SIZE, patch_size=4, num_layers=2, num_heads=2, width=16,
            hidden_width=32, classes=CLASSES, dropout=0.1,
            attention="blockwise",  # XLA's has its softmax in float32
            **types,
        ),
    ),
}  # fmt: skip


def in_float64(kind: str) -> Any:
    model_type, config = MODELS[kind](**TYPES)
    model = filled(lambda: model_type(config, rngs=nnx.Rngs(0)))
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        # Flax makes these float32, whatever it is told.
        variable.set_value(variable.get_value().astype(float))
    return model


@functools.cache
def made(kind: str) -> Any:
    return in_float64(kind)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(24, SIZE, SIZE, 3)),
            "targets": rng.dirichlet(np.ones(CLASSES), 24),
            "weights": (rng.random(24) < 0.8).astype(float),
        }
        for _ in range(STEPS)
    ]


def loss_fn(model: Any, batch: Any) -> Any:
    return classification_loss(model(batch["image"]), batch, top=(1, 2))


@functools.cache
def plain_run(kind: str) -> tuple[Any, Any, Any]:
    """(metrics, parameters, batch statistics) of one device, without a mesh."""
    model = nnx.clone(made(kind))
    model.train()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest, batch):
        module = nnx.merge(graphdef, params, rest, copy=True)
        mean, accuracies = loss_fn(module, batch)
        return mean.total / mean.count, (
            nnx.state(module, nnx.Not(nnx.Param)), accuracies["accuracy"].compute()
        )  # fmt: skip

    update, opt_state, history = make_update(TX), TX.init(params), []
    for batch in batches():
        (value, (rest, accuracy)), grads = loss(params, rest, batch)
        params, opt_state = update(grads, opt_state, params)
        history.append((value, accuracy))
    return history, params, nnx.filter_state(rest, nnx.BatchStat)


@pytest.mark.slow  # by default, that of test_decoder_family
@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("regnet", (2, 3)),
        ("regnet", (1, 8)),
        ("resnet", (2, 4)),
        ("resnet", (1, 6)),
        ("vit", (4, 1)),
        ("vit", (2, 4)),
    ],
    ids="regnet-2x3 regnet-1x8 resnet-2x4 resnet-1x6 vit-4x1 vit-2x4".split(),
)
def test_a_run_is_that_of_one_device(x64, kind, mesh):
    fsdp = jshard.FSDP(make_mesh(*mesh), jshard.Policy(min_shard_elements=0))
    state = fsdp.from_model(made(kind), TX)
    step, history = fsdp.train_step(loss_fn, TX), []
    for batch in batches():
        state, metrics = step(state, fsdp.shard_batch(batch))
        history.append((metrics["loss"], metrics["accuracy"]))
    statistics = nnx.filter_state(state.model_state, nnx.BatchStat)
    for array in jax.tree.leaves(statistics):  # equal on every device
        first, *others = (np.asarray(shard.data) for shard in array.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(other, first)
    got = (history, *fsdp.fetch((state.params, statistics)))
    for g, w in zip(
        jax.tree.leaves(got), jax.tree.leaves(plain_run(kind)), strict=True
    ):
        # Biases of keys have no gradient but rounding, 1e-18.
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-9 * np.abs(w).max() + 1e-15)


@pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit")
@pytest.mark.slow
def test_statistics_are_float32_where_the_rest_is_bfloat16():
    precision = jshard.Precision(param="bfloat16", compute="bfloat16", reduce="float32")
    fsdp = jshard.FSDP(make_mesh(2, 4), jshard.Policy(precision=precision))
    model_type, config = MODELS["regnet"]()
    state = fsdp.init(lambda rngs: model_type(config, rngs=rngs), TX)
    state, _ = fsdp.train_step(loss_fn, TX)(state, fsdp.shard_batch(batches()[0]))
    for array in jax.tree.leaves(nnx.filter_state(state.model_state, nnx.BatchStat)):
        assert array.dtype == jnp.float32
    for array in jax.tree.leaves(state.params):
        assert array.dtype == jnp.bfloat16


@pytest.mark.quick("ResNet-50", "ViT-B/16")
@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (lambda rngs: RegNet(RegNetConfig(), rngs=rngs), 83.6),  # as published
        (lambda rngs: ResNet(ResNetConfig(), rngs=rngs), 25.6),
        (lambda rngs: ViT(ViTConfig(), rngs=rngs), 86.6),
    ],
    ids=["RegNetY-16GF", "ResNet-50", "ViT-B/16"],
)
def test_the_default_sizes_are_the_published_ones(make, millions):
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert round(count / 1e6, 1) == millions


def test_accuracies_count_the_target_among_the_first():
    logits = jnp.asarray([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    targets = np.eye(3)[[0, 2, 1]]
    batch = {"targets": jnp.asarray(targets), "weights": jnp.ones(3)}
    loss, accuracies = classification_loss(logits, batch, top=(1, 2))
    want = optax.softmax_cross_entropy(logits, batch["targets"]).mean()
    np.testing.assert_allclose(loss.compute(), want, rtol=1e-6)
    np.testing.assert_allclose(accuracies["accuracy"].compute(), 1 / 3)
    np.testing.assert_allclose(accuracies["top2_accuracy"].compute(), 1)


def test_weights_that_would_broadcast_are_refused():
    batch = {"targets": jnp.eye(3), "weights": jnp.ones((3, 1))}
    with pytest.raises(AssertionError, match="shape"):
        classification_loss(jnp.zeros((3, 3)), batch)
    batch = {"targets": jnp.ones((3, 1)), "weights": jnp.ones(3)}
    with pytest.raises(AssertionError, match="shape"):
        classification_loss(jnp.zeros((3, 3)), batch)


def test_pixels_are_normalised_by_channel():
    grey = normalize(jnp.full((1, 2, 2, 1), 255, jnp.uint8))
    color = normalize(jnp.full((1, 2, 2, 3), 255, jnp.uint8))
    np.testing.assert_allclose(grey, (1 - 0.456) / 0.224, rtol=1e-6)
    np.testing.assert_allclose(color[..., 2], (1 - 0.406) / 0.225, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: RegNetConfig(depths=(1, 2)), r"depths=\(1, 2\) and widths="),
        (lambda: RegNetConfig(depths=(0, 2, 2, 2)), "the number of blocks"),
        (lambda: RegNetConfig(group_width=100), "224 is not divisible by 2|448|1232"),
        (lambda: ResNetConfig(widths=(6, 8, 8, 8)), "must be divisible by 4"),
        (lambda: ViTConfig(patch_size=15), "image_size=224 is not divisible by"),
        (lambda: ViTConfig(num_heads=5), "width=768 is not divisible by num_heads=5"),
    ],
)
def test_impossible_sizes_are_one_line(config, message):
    with pytest.raises(jshard.UserError, match=message):
        config()


@pytest.mark.parametrize("kind", MODELS)
def test_images_of_another_shape_are_one_line(kind):
    model_type, config = MODELS[kind]()
    model = nnx.eval_shape(lambda: model_type(config, rngs=nnx.Rngs(0)))
    with pytest.raises(jshard.UserError, match=r"\[2, 16, 16, 1\]; model.channels=3"):
        jax.eval_shape(lambda x: model(x), jnp.zeros((2, SIZE, SIZE, 1)))
    if kind == "vit":
        with pytest.raises(jshard.UserError, match=r"model.image_size=16 means"):
            jax.eval_shape(lambda x: model(x), jnp.zeros((2, 8, 8, 3)))
