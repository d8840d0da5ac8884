"""Models trained with sequences, features or experts split over devices.

The reference is the model as an ordinary Flax module, on one device, with JAX and optax
alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard
import parity
from filled import filled
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig
from jshard.plan.start_up import traffic
from jshard.sharding.settings.loss import Loss, Mean

TIME, VOCABULARY, STEPS = 24, 40, 3
SEQUENCES = ("inputs", "targets", "weights", "segments", "positions")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "width": 16,
    "loss_chunk": 16,
    "attention": "blockwise",  # in the inputs' dtype throughout
    "dtype": jnp.float64,
    "param_dtype": jnp.float64,
}
LLAMA: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden": 32,
    "sequence_length": TIME,
}


def gpt(rngs, **sizes):
    own = {"num_heads": 4, "sequence_length": TIME, "dropout": 0.1}
    return GPT(GPTConfig(**SIZES | own | sizes), rngs=rngs)


def llama(rngs, **sizes):
    return Llama(LlamaConfig(**SIZES | LLAMA | sizes), rngs=rngs)


def uneven_experts(rngs, **sizes):
    """Most tokens prefer two of eight experts, so that there are further rounds."""
    own = {"num_experts": 8, "balance_weight": 0.1, "expert_capacity": 0.3}
    return skewed(llama(rngs, **own | sizes))


def skewed(model):
    router = model.blocks.experts.router.kernel
    router.set_value(jnp.asarray(router.get_value()).at[:, :, :2].multiply(40))
    return model


MODELS = {
    "gpt": gpt,
    "gpt in float32": functools.partial(
        gpt, dtype=jnp.float32, param_dtype=jnp.float32
    ),
    "two heads": functools.partial(gpt, num_heads=2),
    "untied": functools.partial(gpt, tied=False),
    "llama": llama,
    "three heads": functools.partial(
        llama, num_heads=3, num_kv_heads=3, width=18, hidden=33, vocab_size=42
    ),
    "untied llama": functools.partial(llama, tied=False),
    "odd vocabulary": functools.partial(llama, tied=False, vocab_size=43),
    "odd and capped": functools.partial(
        llama, tied=False, vocab_size=43, logit_soft_cap=3.0
    ),
    "five layers": functools.partial(llama, num_layers=5, tied=False),
    "fused": functools.partial(llama, fused=True),
    "tiles": functools.partial(llama, mlp_tile=8, qk_norm=True, qkv_bias=True),
    "joint norms": functools.partial(llama, qk_norm=True, joint_qk_norm=True),
    "windows": functools.partial(llama, pattern="sf", window=5),
    "experts": functools.partial(
        llama, num_experts=4, experts_per_token=2, balance_weight=0.01
    ),
    "uneven experts": uneven_experts,
    "uneven, not balanced": functools.partial(uneven_experts, balance_weight=0.0),
    "gpt-oss": functools.partial(
        llama,
        sinks=True,
        expert_bias=True,
        expert_limit=0.05,
        activation="quick_gelu",
        num_experts=8,
        pattern="sf",
        window=5,
    ),
    "deepseek": functools.partial(
        llama,
        num_layers=3,
        num_kv_heads=4,
        kv_rank=12,
        q_rank=10,
        head_width=8,
        rotary_width=4,
        value_width=6,
        num_experts=8,
        sigmoid_router=True,
        expert_groups=4,
        chosen_groups=2,
        shared_hidden=20,
        dense_layers=1,
        dense_hidden=28,
    ),
    "gemma": functools.partial(
        llama,
        head_width=8,
        qk_norm=True,
        pattern="ssf",
        window=5,
        num_layers=3,
        sliding_theta=50.0,
        attention_scale=12.0,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        activation="gelu_tanh",
        norm_offset=True,
        post_norms=True,
        scaled_embeddings=True,
        tied=True,
    ),
    "glm": functools.partial(
        llama,
        num_layers=3,
        rotary_width=2,
        qk_norm=True,
        qkv_bias=True,
        num_experts=8,
        sigmoid_router=True,
        expert_scale=2.5,
        shared_hidden=20,
        dense_layers=1,
        dense_hidden=28,
        tied=False,
    ),
    "corrected": functools.partial(
        uneven_experts,
        num_layers=3,
        sigmoid_router=True,
        expert_groups=4,
        chosen_groups=2,
        expert_scale=2.5,
        shared_hidden=20,
        dense_layers=1,
        dense_hidden=28,
        balance_weight=0.0,
        correction_rate=0.05,  # large enough to change who is chosen
    ),
    # As much as a default test of all axes can ask of one model.
    "all at once": functools.partial(
        uneven_experts,
        tied=False,
        vocab_size=43,
        sigmoid_router=True,
        balance_weight=0.0,
        correction_rate=0.05,
    ),
    "experts in float32": functools.partial(
        uneven_experts, dtype=jnp.float32, param_dtype=jnp.float32
    ),
}


def batch(packed: bool, step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCABULARY, (8, TIME + 1))
    found: dict[str, Any] = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    found["weights"] = 1.0 * (rng.random((8, TIME)) > 0.2)
    if packed:
        segments = np.sort(rng.integers(0, 3, (8, TIME)), axis=1)
        first = np.array([[np.argmax(r == s) for s in r] for r in segments])
        found |= {"segments": segments, "positions": np.arange(TIME) - first}
    return found


def loss_fn(model: Any, batch: Any) -> Any:
    packed = {}
    if "segments" in batch:
        packed["segment_ids_BT"] = batch["segments"]
        packed["positions_BT"] = batch["positions"]
    return model.loss(batch["inputs"], batch["targets"], batch["weights"], **packed)


def of_parts(model: Any, batch: Any, number: int) -> Any:
    """The loss whose totals and counts are the sums of those of parts of the batch."""
    if number == 1:
        return loss_fn(model, batch)
    split = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
    parts = [jax.tree.map(lambda x, i=i: x[i], split) for i in range(number)]
    terms = []
    for of_term in zip(*(loss_fn(model, part).terms for part in parts), strict=True):
        means = [mean for _, mean in of_term]
        total = sum(mean.total for mean in means)
        terms.append((of_term[0][0], Mean(total, sum(mean.count for mean in means))))
    return Loss(tuple(terms))


@functools.cache
def made(model: str) -> Any:
    """The model, made once: each mesh would compile its random numbers again.

    The one that trains by default has NumPy's, which take no compiling at all.
    """
    make = lambda: MODELS[model](nnx.Rngs(jax.random.key(0)))
    return skewed(filled(make)) if model == "all at once" else make()


@functools.cache
def plain(
    model: str, packed: bool, optimizer: str, parts: int = 1
) -> tuple[list[float], dict, dict]:
    """Losses, final parameters and statistics without jshard's steps, on one device.

    Those of examples are of each of ``parts`` of the batch.
    """
    graphdef, params, rest = nnx.split(made(model), nnx.Param, ...)
    tx = parity.TRANSFORMATIONS[optimizer]()
    # As jshard does: an optimizer that looks at whole tensors sees each layer alone.
    tx = tx if optimizer in parity.ELEMENTWISE else jshard.optim.per_layer(tx)

    @jax.jit
    def step(params, rest, opt_state, batch):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = of_parts(model, batch, parts).compute()
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, value

    opt_state, losses = tx.init(params), []
    for number in range(STEPS):
        arguments = params, rest, opt_state, batch(packed, number)
        params, rest, opt_state, value = step(*arguments)
        losses.append(float(value))
    statistics = nnx.filter_state(rest, nnx.BatchStat)
    return losses, parity.by_path(params), parity.by_path(statistics)


def _prepare(optimizer: str = "adamw", **options: Any) -> tuple:
    """(fsdp, optimizer) on a mesh; other options are those of the policy."""
    names = ("replica", "pipe", "fsdp", "context", "tensor", "expert", "devices")
    mesh = {name: options.pop(name) for name in names if name in options}
    policy = jshard.Policy(min_shard_elements=0, **options)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy, sequences=SEQUENCES)
    return fsdp, parity.of_layers(optimizer)


def start(model: str, optimizer: str = "adamw", **options: Any) -> tuple:
    """(fsdp, state, train step) on a mesh."""
    fsdp, tx = _prepare(optimizer, **options)
    return fsdp, fsdp.from_model(made(model), tx), fsdp.train_step(loss_fn, tx)


def compiled(model: str, **options: Any) -> Any:
    """A step of a model without values, compiled."""
    _, step, arguments = _without_values(model, **options)
    return step.lower(*arguments).compile()


def exchanged(model: str, **options: Any) -> Any:
    """The traffic of a step of a model without values, by kind and dtype."""
    mesh, step, arguments = _without_values(model, **options)
    return traffic(step.trace(*arguments).jaxpr.jaxpr, dict(mesh.shape))


def _without_values(model: str, **options: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    fsdp, tx = _prepare(**options)
    arguments = (
        fsdp.abstract_state(MODELS[model], tx),
        fsdp.shard_batch(batch(False, 0)),
    )
    return fsdp.mesh, fsdp.train_step(loss_fn, tx), arguments


def trains_alike(
    model: str,
    packed: bool,
    optimizer: str,
    options: dict[str, Any],
    parts: int = 1,
) -> None:
    """Asserts that a mesh's run follows that on one device, to 1e-9."""
    options = dict(options)
    if number := options.get("devices"):
        options["devices"] = jax.devices()[:number]
    losses, params, statistics = plain(model, packed, optimizer, parts)
    fsdp, state, train_step = start(model, optimizer, **options)
    found = []
    for number in range(STEPS):
        state, metrics = train_step(state, fsdp.shard_batch(batch(packed, number)))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert parity.worst(parity.by_path(fsdp.fetch(state.params)), params) <= 1e-9
    state = nnx.filter_state(state.model_state, nnx.BatchStat)
    jax.tree.map(np.testing.assert_array_equal, parity.by_path(state), statistics)
