"""Adapters of all kinds, on every axis, beside a plain model of merged weights.

The reference is the model as an ordinary Flax module without adapters, on one device:
its weights are ``W + s A B``, or DoRA's, which the test computes itself. In float64.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from split_models import MODELS, SEQUENCES, VOCABULARY, batch, loss_fn

RANK, ALPHA, STEPS = 3, 5.0, 3
ALL = ("*", "head", "embed")
TX = optax.adamw(1e-2)

OPTIONS: dict[str, Any] = {"param_dtype": float}


def waves(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initial values that compile in no time."""
    del key
    return jax.device_put(
        np.asarray(np.sin(np.arange(math.prod(shape)) ** 2).reshape(shape) / 4, dtype)
    )


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = functools.partial(nnx.Linear, **OPTIONS, kernel_init=waves, rngs=rngs)
        self.up, self.down = make(16, 20), make(20, 16)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Small(nnx.Module):
    """All kinds of layers, and little to compile."""

    def __init__(self, rngs: nnx.Rngs):
        options: dict[str, Any] = OPTIONS | {"rngs": rngs}
        table = nnx.Embed(VOCABULARY, 16, embedding_init=waves, **options)
        self.embed = jshard.Unit(table)
        self.blocks = jshard.Stack(Layer, 2, rngs=rngs)
        head = nnx.Linear(16, VOCABULARY, kernel_init=waves, **options)
        self.head = jshard.Unit(head)

    def loss(self, inputs: Any, targets: Any, weights: Any) -> jshard.Mean:
        logits = self.head(self.blocks(self.embed(inputs)))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jshard.Mean(jnp.sum(loss * weights), jnp.sum(weights))


# model, targets, further arguments of add_lora, and the mesh
CASES: dict[str, tuple[str, tuple[str, ...], dict, dict]] = {
    "small": ("small", ALL, {}, {"replica": 2}),
    "small dora": ("small", ("*", "head"), {"dora": True}, {"devices": 3}),
    "one device": ("untied llama", ALL, {}, {"devices": 1}),
    "rslora": ("untied llama", ALL, {"rank_stabilized": True}, {"devices": 3}),
    "dora": (
        "untied llama",
        ("*", "head"),
        {"dora": True, "rank_stabilized": True},
        {"devices": 3},
    ),
    "dora on 1": ("untied llama", ("*", "head"), {"dora": True}, {"devices": 1}),
    "dora on 2": ("gpt", ("*",), {"dora": True}, {"devices": 2}),
    "dora on 8": (
        "llama",
        ("*",),
        {"dora": True, "rank_stabilized": True},
        {"replica": 2},
    ),
    "tied": ("llama", ("embed", "attention.*"), {}, {"devices": 6}),
    "experts": ("uneven experts", ("*", "experts.*"), {}, {"devices": 2}),
    "experts on 8": ("uneven experts", ("experts.*",), {}, {}),
    "split experts": ("uneven experts", ("experts.*", "embed"), {}, {"expert": 4}),
    "tensor and experts": (
        "uneven experts",
        ("*", "experts.*"),
        {},
        {"expert": 2, "tensor": 2},
    ),
    "tensor": ("untied llama", ALL, {}, {"tensor": 2, "devices": 4}),
    "tensor, fused": ("fused", ("*", "embed"), {}, {"tensor": 2}),
    "tensor, gpt": ("gpt", ("*",), {}, {"tensor": 2}),
    "tensor, dora of columns": (
        "odd vocabulary",
        ("attention.q", "up", "gate", "head"),
        {"dora": True},
        {"tensor": 2, "devices": 4},
    ),
    "context": ("untied llama", ALL, {}, {"context": 2}),
    "pipeline": ("untied llama", ALL, {}, {"pipe": 2, "devices": 4}),
    "pipeline, dora": ("llama", ("*",), {"dora": True}, {"pipe": 2, "devices": 2}),
    "pipeline, tensor and experts": (
        "uneven experts",
        ("*", "experts.*"),
        {},
        {"pipe": 2, "expert": 2, "tensor": 2},
    ),
}


def plain(model: str, rngs: nnx.Rngs) -> Any:
    if model == "small":
        return Small(rngs)
    return MODELS[model](rngs, **({"dropout": 0.0} if model == "gpt" else {}))


def make(model: str, targets: tuple[str, ...], options: dict, rngs: nnx.Rngs) -> Any:
    """The model with adapters that change it from the first step on.

    Waves for random numbers: those of each parameter would take long to compile.
    """
    made = plain(model, rngs)
    given: dict[str, Any] = {"rank": RANK, "alpha": ALPHA, "param_dtype": float}
    jshard.nn.add_lora(made, targets=targets, **given | options, rngs=rngs)
    for path, variable in nnx.to_flat_state(nnx.state(made, nnx.LoRAParam)):
        if path[-1] != "lora_m":
            value = variable.get_value()
            wave = jnp.sin(jnp.arange(value.size, dtype=value.dtype) ** 2)
            variable.set_value(value + 0.2 * wave.reshape(value.shape))
    return made


def merged(model: Any, adapters: nnx.State, options: dict) -> Any:
    """A copy of a model without adapters, with these in its weights."""
    model = nnx.clone(model)
    weights = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    flat = {path: x.get_value() for path, x in nnx.to_flat_state(adapters)}
    root = math.sqrt(RANK) if options.get("rank_stabilized") else RANK
    for path in {path[:-1] for path in flat}:
        name = "kernel" if (*path, "kernel") in weights else "embedding"
        weight = weights[*path, name].get_value()
        product = jnp.einsum(
            "...ir,...ro->...io", flat[*path, "lora_a"], flat[*path, "lora_b"]
        )
        new = weight + ALPHA / root * product
        if options.get("dora"):
            norms = jnp.sqrt(jnp.sum(new**2, axis=-2, keepdims=True))
            factor = flat[*path, "lora_m"][..., None, :]
            new = new * factor / jax.lax.stop_gradient(norms)
        # A tied table's head is the table without its adapter, as in PEFT.
        weights[*path, name].set_value(new)
    return model


# tests/nn/test_adapted_layers.py has the formulas of the other kinds by default.
@pytest.mark.slow  # test_existing_model.py trains adapters
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:mesh. pipe=.*bubble")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_adapters_train_as_in_merged_weights(case):
    name, targets, options, mesh = case
    if number := mesh.get("devices"):
        mesh = mesh | {"devices": jax.devices()[:number]}
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy, sequences=SEQUENCES)
    rngs = lambda: nnx.Rngs(jax.random.key(0))
    both = lambda: (make(name, targets, options, rngs()), plain(name, rngs()))
    model, base = nnx.jit(both)()
    state = fsdp.from_model(model, TX, wrt=nnx.LoRAParam)
    step = fsdp.train_step(loss_fn, TX)

    adapters, frozen = nnx.state(model, nnx.LoRAParam), fsdp.fetch(state.frozen)
    graphdef, rest = nnx.split(base)

    @jax.jit
    @jax.value_and_grad
    def loss(adapters, examples):
        model = merged(nnx.merge(graphdef, rest), adapters, options)
        return loss_fn(model, examples).compute()

    update, opt_state = parity.make_update(TX), jax.jit(TX.init)(adapters)
    for i in range(STEPS):
        examples = padded(batch(False, i), fsdp.mesh.size)
        state, metrics = step(state, fsdp.shard_batch(examples))
        value, grads = loss(adapters, examples)
        np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-9)
        adapters, opt_state = update(grads, opt_state, adapters)
    found = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(found, parity.by_path(adapters)) <= 1e-9
    jax.tree.map(np.testing.assert_array_equal, fsdp.fetch(state.frozen), frozen)


def padded(examples: dict[str, Any], devices: int) -> dict[str, Any]:
    more = -len(examples["inputs"]) % devices
    widths = lambda x: ((0, more), *[(0, 0)] * (x.ndim - 1))
    return {key: np.pad(x, widths(x)) for key, x in examples.items()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "targets", "options", "message"),
    [
        ("llama", ("down",), {"dora": True}, r"rows of 'blocks\.down', and DoRA needs"),
        ("experts", ("gate",), {"dora": True}, r"unlike 'blocks\.experts\.gate'"),
        ("experts", ("up",), {"dropout": 0.1}, r"not for experts, as 'blocks\.experts"),
    ],
)
def test_what_cannot_be_adapted_so_is_an_error_of_one_line(
    model, targets, options, message
):
    fsdp = jshard.FSDP(jshard.make_mesh(tensor=2))
    with pytest.raises(jshard.UserError, match=message) as error:
        fsdp.abstract_state(
            lambda rngs: make(model, targets, options, rngs), TX, nnx.LoRAParam
        )
    assert "\n" not in str(error.value)
