"""Every pair of knobs trains a small GPT and follows a run on one device.

That run is the same GPT as an ordinary Flax model under plain optax, in float64. Knobs
that lose precision by design have a bound of their own.
"""

import dataclasses
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
from jshard.models.gpt import GPT, GPTConfig
from parity import every_pair, make_mesh, worst

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, TIME, VOCABULARY = 3, 16, 8, 32
CONFIG = GPTConfig(
    vocab_size=VOCABULARY,
    sequence_length=TIME,
    num_layers=2,
    num_heads=2,
    width=16,
    loss_chunk=16,
    dtype=jnp.float64,
    param_dtype=jnp.float64,
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": ((1, 8), (2, 4), (8, 1)),
    "reshard": (True, False, 2),
    "remat": ("full", "dots", "none", "names", "offload"),
    "first_k": (None, 1),
    "prefetch": (False, True),
    "reshard_root": (False, True),
    "accumulate": (1, 2),
    "defer_scatter": (False, True),
    "loss_scale": (False, True),
    "ema_decay": (None, 0.9),
    "gather": (None, "bfloat16", "int8", "float8_e4m3fn"),
    "reduce": (None, "bfloat16"),
    "sum": (None, "float32"),
    "tied": (False, True),
    "offload": (None, "optimizer", "all"),
    "moments": (None, "bfloat16"),
}
NAMES = ("qkv", "hidden")
REMATS = {"names": jshard.Names(*NAMES), "offload": jshard.Offload(*NAMES)}
# The largest relative error of a loss or a gradient norm, by what rounds. That of
# float8 is as much larger than bfloat16's as its mantissa is shorter: 0.03 for 0.002 in
# the first step, and more after two updates.
BOUNDS = {
    "float8_e4m3fn": 0.1,
    "int8": 0.02,
    "bfloat16": 0.01,
    "float32": 1e-5,
    None: 1e-7,  # jax.nn.dot_product_attention takes every softmax in float32
}


def loss_fn(model: GPT, batch: Any) -> jshard.Mean | jshard.Loss:
    return model.loss(batch["inputs"], batch["targets"], batch["weights"])


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "inputs": rng.integers(0, VOCABULARY, (BATCH, TIME)),
            "targets": rng.integers(0, VOCABULARY, (BATCH, TIME)),
            "weights": (rng.random((BATCH, TIME)) < 0.8) * 1.0,
        }
        for _ in range(STEPS)
    ]


def make_model(tied: bool) -> GPT:
    config = dataclasses.replace(CONFIG, tied=tied)
    return filled(lambda: GPT(config, rngs=nnx.Rngs(0)))


def optimizer(moments: str | None) -> optax.GradientTransformation:
    tx = optax.adamw(1e-2)
    tx = tx if moments is None else jshard.optim.bf16_moments(tx)
    return jshard.optim.chain(optax.clip_by_global_norm(0.5), tx)  # for offload


@functools.cache
def one_device(tied: bool) -> list[dict[str, float]]:
    """Losses and gradient norms of a run without a mesh."""
    graphdef, params, rest = nnx.split(make_model(tied), nnx.Param, ...)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            return loss_fn(nnx.merge(graphdef, params, rest), batch).compute()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    history = []
    for batch in batches():
        params, opt_state, metrics = step(params, opt_state, batch)
        history.append({k: float(x) for k, x in metrics.items()})
    return history


def check(knobs: dict[str, Any]) -> None:
    knobs = dict(knobs)
    replica, shards = knobs.pop("mesh")
    remat, moments = knobs.pop("remat"), knobs.pop("moments")
    tied, reshard = knobs.pop("tied"), knobs.pop("reshard")
    wire = {name: knobs.pop(name) for name in ("gather", "reduce", "sum")}
    if reshard == 2 > shards:
        reshard = 1
    if wire["reduce"] is None:  # a sum that is narrower than what it adds up is none
        wire["sum"] = None
    policy = jshard.Policy(
        remat=REMATS.get(remat, remat),
        reshard_after_forward=reshard
        if isinstance(reshard, bool)
        else min(reshard, shards),
        precision=jshard.Precision(**wire, compute="float64"),
        min_shard_elements=0,
        **knobs,
    )
    fsdp = jshard.FSDP(make_mesh(replica, shards), policy)
    tx = optimizer(moments)
    state = fsdp.from_model(make_model(tied), tx)
    step = fsdp.train_step(loss_fn, tx)
    bound = max(BOUNDS[x] for x in (wire["gather"], wire["reduce"], moments))
    for batch, want in zip(batches(), one_device(tied), strict=True):
        state, metrics = step(state, fsdp.shard_batch(batch))
        got = {name: float(metrics[name]) for name in want}
        assert worst(got, want) <= bound, (got, want)


@pytest.mark.slow  # by default, test_parity and each knob's own tests
@every_pair(**FACTORS)
def test_every_pair_of_knobs_follows_the_run_on_one_device(case):
    check(case)
