"""Collectives have one order on all devices, in every program that jshard compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jshard
from jshard.order import in_order
from models.gpt import GPT, GPTConfig, generate
from order import exchanging, unordered
from stress import Cell, check

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CONFIG = GPTConfig(
    vocab_size=64, sequence_length=16, num_layers=3, num_heads=2, width=32, tied=False
)


class TwoStacks(nnx.Module):
    """Loops that do not read each other's results, and weights outside of them."""

    def __init__(self, rngs):
        def layer(rngs):
            init = nnx.initializers.orthogonal()
            return nnx.Linear(32, 32, kernel_init=init, rngs=rngs)

        self.left = jshard.Stack(layer, 3, rngs=rngs)
        self.right = jshard.Stack(layer, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(32, axis_name=("replica", "fsdp"), rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(64, 64, rngs=rngs))

    def __call__(self, x):
        x = jnp.concatenate([self.left(self.norm(x)), self.right(x)], -1)
        return self.head(x)


def squared(model, batch):
    y = model(batch["x"])
    return jshard.Mean(jnp.sum(jnp.square(y)), y.size)


def gpt_loss(model, batch):
    x = batch["tokens"]
    return model.loss(x, jnp.roll(x, -1, 1), jnp.ones(x.shape))


def muon():
    """Loops around whole layers, and one that the partitioner fills: of the head."""
    return optax.chain(
        optax.clip_by_global_norm(1.0), jshard.per_layer(optax.contrib.muon(1e-2))
    )


MAKERS = {
    "gpt": (
        lambda rngs: GPT(CONFIG, rngs=rngs),
        gpt_loss,
        {"tokens": jnp.zeros((16, 16), int)},
    ),
    "two stacks": (TwoStacks, squared, {"x": jnp.ones((16, 32))}),
}
POLICIES = {
    "full": jshard.Policy(min_shard_elements=0),
    "dots": jshard.Policy(remat="dots", min_shard_elements=0),
    "none": jshard.Policy(remat="none", min_shard_elements=0),
    "prefetch": jshard.Policy(prefetch=True, min_shard_elements=0),
    "zero2": jshard.Policy(reshard_after_forward=False, min_shard_elements=0),
    "accumulate": jshard.Policy(accumulate=2, min_shard_elements=0),
    "no_sync": jshard.Policy(accumulate=2, defer_scatter=True, min_shard_elements=0),
    "root": jshard.Policy(reshard_root=True, min_shard_elements=0),
    "bf16 sums": jshard.Policy(
        precision=jshard.Precision(reduce="bfloat16", sum="float32"),
        min_shard_elements=0,
    ),
}
OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "muon": muon,
    "lamb": lambda: jshard.per_layer(optax.lamb(1e-3)),
    "adafactor": lambda: jshard.per_layer(optax.adafactor(1e-3)),
    "every second": lambda: optax.MultiSteps(OPTIMIZERS["adamw"](), 2),
    "finite": lambda: optax.apply_if_finite(muon(), 3),
}


def setup(model, policy=POLICIES["full"], optimizer=None, **mesh):
    make_model, loss_fn, batch = MAKERS[model]
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    optimizer = optimizer or optax.sgd(0.1)
    state = fsdp.abstract_state(make_model, optimizer)
    return fsdp, optimizer, state, loss_fn, fsdp.shard_batch(batch)


def assert_ordered(traced):
    text = traced.lower().compile(compiler_options=QUICK).as_text()
    assert exchanging(text)
    assert unordered(text) == []


@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_orders_its_collectives(model, policy):
    fsdp, optimizer, state, loss_fn, batch = setup(model, POLICIES[policy])
    assert_ordered(fsdp.train_step(loss_fn, optimizer).trace(state, batch))


@pytest.mark.parametrize("mesh", [{"replica": 2}, {"fsdp": 1, "replica": 8}], ids=str)
def test_training_orders_its_collectives_on_hybrid_meshes(mesh):
    fsdp, optimizer, state, loss_fn, batch = setup("gpt", **mesh)
    assert_ordered(fsdp.train_step(loss_fn, optimizer).trace(state, batch))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_order_their_collectives(optimizer):
    optimizer = OPTIMIZERS[optimizer]()
    fsdp, optimizer, state, loss_fn, batch = setup("two stacks", optimizer=optimizer)
    assert_ordered(fsdp.train_step(loss_fn, optimizer).trace(state, batch))


@pytest.mark.parametrize("model", MAKERS)
def test_evaluation_orders_its_collectives(model):
    fsdp, _, state, loss_fn, batch = setup(model)
    assert_ordered(fsdp.eval_step(loss_fn).trace(state, batch))


def test_prediction_orders_its_collectives():
    fsdp, _, state, _, _ = setup("gpt")
    tokens, seed = np.zeros((8, 4), np.int32), np.zeros(8, np.uint32)
    prompt = fsdp.shard_batch({"tokens": tokens, "seed": seed})
    predict = fsdp.predict_step(functools.partial(generate, length=4))
    assert_ordered(predict.trace(state, prompt))
