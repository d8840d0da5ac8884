"""What models/llama.py's families do differently, on one device and on the mesh.

That it is what transformers does is in tests/huggingface.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo
import jshard
import parity
from filled import filled
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.moe import MixtureOfExperts, Router, load_balancing_loss
from jshard.recipes.llama import loss_fn

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "width": 16,
    "hidden": 24,
    "loss_chunk": 8,
    "attention": "blockwise",  # the others have their softmax in float32
}
GEMMA: dict[str, Any] = {
    "head_width": 8,
    "qk_norm": True,
    "pattern": "ssf",
    "window": 4,
    "sliding_theta": 50.0,
    "rope_scaling": "linear",
    "rope_factor": 2.0,
    "attention_scale": 12.0,
    "attention_soft_cap": 2.0,
    "logit_soft_cap": 3.0,
    "activation": "gelu_tanh",
    "norm_offset": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "tied": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "experts_per_token": 3,
    "normalized_experts": False,
    "qkv_bias": True,
}
GROUPS: dict[str, Any] = {
    "num_experts": 8,
    "experts_per_token": 3,
    "sigmoid_router": True,
    "expert_groups": 4,
    "chosen_groups": 2,
    "expert_scale": 1.5,
    "shared_hidden": 20,
    "dense_layers": 1,
    "dense_hidden": 28,
}
LATENTS: dict[str, Any] = {
    "num_kv_heads": 4,
    "kv_rank": 12,
    "q_rank": 10,
    "head_width": 8,
    "rotary_width": 4,
    "value_width": 6,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_length": 8,
    "rope_mscale": 1.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": GEMMA,
    "experts": EXPERTS,
    "balanced": {**EXPERTS, "balance_weight": 0.1, "pattern": "fs", "window": 3},
    "fused": {"fused": True, "pattern": "s", "window": 3},
    "olmo": {
        "qk_norm": True,
        "joint_qk_norm": True,
        "pre_norms": False,
        "post_norms": True,
        "pattern": "sf",
        "window": 4,
        "sliding_theta": 50.0,
    },
    "gpt-oss": {
        "sinks": True,
        "expert_bias": True,
        "expert_limit": 0.5,
        "activation": "quick_gelu",
        "num_experts": 8,
        "experts_per_token": 3,
        "pattern": "sf",
        "window": 3,
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_length": 8,
        "rope_truncate": False,
    },
    "glm": {**GROUPS, "rotary_width": 2, "qk_norm": True, "balance_weight": 0.1},
    "deepseek": {**GROUPS, **LATENTS, "num_layers": 4},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_length": 8},
}


def make_model(family: str, **options: Any) -> Llama:
    """A model in float64 whose parameters are all random, and not small."""
    config = LlamaConfig(**SMALL | FAMILIES[family] | options)
    config = dataclasses.replace(config, dtype=jnp.float64, param_dtype=jnp.float64)
    return filled(lambda: Llama(config, rngs=nnx.Rngs(0)))


def packed_batch(rows: int, T: int, first: Any = None) -> dict[str, np.ndarray]:
    """Rows of two documents of different lengths: the first is as long as is given."""
    rng = np.random.default_rng(1)
    if first is None:
        first = rng.integers(1, T, (rows, 1))
    here = np.arange(T)
    return {
        "inputs": rng.integers(0, 40, (rows, T)),
        "targets": rng.integers(0, 40, (rows, T)),
        "weights": (rng.random((rows, T)) < 0.7) * 1.0,
        "positions": np.where(here < first, here, here - first).astype(np.int32),
        "segment_ids": (here >= first).astype(np.int32),
    }


REMATS: dict[tuple[int, int], Any] = {
    (1, 8): "full",
    (2, 4): "none",
    (1, 3): "none",
    (1, 5): "dots",
    (1, 7): "full",
    (2, 3): "none",
}


@pytest.mark.slow  # by default test_llama, test_parity and test_experts_and_padding
@pytest.mark.parametrize(
    ("family", "mesh"),
    [  # each family on two meshes
        pytest.param(family, mesh, id=f"{family}-{mesh[0]}x{mesh[1]}")
        for i, family in enumerate(FAMILIES)
        for mesh in (list(REMATS)[i % 3], list(REMATS)[i % 3 + 3])
    ],
)
def test_a_sharded_run_follows_one_device(x64, family, mesh):
    remat = REMATS[mesh]
    batch, tx = packed_batch(2 * math.prod(mesh), 8), optax.sgd(0.1)
    fewer = {"num_layers": 2} if mesh == (2, 3) else {}  # as by default
    model = make_model(family, **fewer)

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    losses = []

    @jax.jit
    def plain_step(params):  # without jshard around it
        loss = lambda params: loss_fn(nnx.merge(graphdef, params, rest), batch)
        value, grads = jax.value_and_grad(lambda p: loss(p).compute())(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    for _ in range(2):
        value, params = plain_step(params)
        losses.append(value)

    policy = jshard.Policy(min_shard_elements=0, remat=remat)
    fsdp = jshard.FSDP(parity.make_mesh(*mesh), policy)
    state, step = fsdp.from_model(model, tx), fsdp.train_step(loss_fn, tx)
    for want in losses:
        state, metrics = step(state, fsdp.shard_batch(batch))
        assert parity.error(metrics["loss"], want) <= 1e-9
    got = fsdp.fetch(state.params)
    errors = jax.tree.map(parity.error, nnx.to_pure_dict(got), nnx.to_pure_dict(params))
    assert max(jax.tree.leaves(errors)) <= 1e-9


@pytest.mark.quick("gemma")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_have_the_losses_of_the_documents_alone(x64, family):
    # Two lengths in three orders: few programs.
    batch = packed_batch(3, 12, first=np.array([[5], [7], [5]]))
    model = make_model(family, balance_weight=0.0)
    loss = nnx.jit(loss_fn)
    packed = loss(model, batch)
    total = 0.0
    for row in range(3):
        cut = int(np.argmax(batch["segment_ids"][row]))
        for part in (slice(0, cut), slice(cut, None)):
            names = ("inputs", "targets", "weights")
            alone = {name: batch[name][row : row + 1, part] for name in names}
            total += loss(model, alone).total
    assert parity.error(packed.total, total) <= 1e-9


@pytest.mark.quick("deepseek")
@pytest.mark.parametrize("family", ["gpt-oss", "glm", "deepseek", "olmo"])
def test_decoding_gives_the_logits_of_the_whole_text(x64, family):
    model, T = make_model(family, num_layers=2), 12
    tokens = np.random.default_rng(2).integers(0, 40, (2, T))
    want = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    decode = nnx.jit(lambda model, *inputs: model.decode(*inputs))
    cache, got = model.init_cache(2, T), []
    for start, stop in ((0, 4), (4, 8), (8, T)):  # of one shape: one program
        part = tokens[:, start:stop]
        positions = np.broadcast_to(np.arange(start, stop), part.shape)
        logits, cache = decode(model, part, positions, cache)
        got.append(logits)
    assert parity.error(jnp.concatenate(got, axis=1), want) <= 1e-9
    if family == "deepseek":
        latents = LATENTS["kv_rank"] + LATENTS["rotary_width"]
        assert [x.size for x in cache] == [2 * 2 * T * latents]


def test_a_tokens_experts_are_in_its_best_groups(x64):
    N, D, E, K = 30, 4, 8, 3
    config = LlamaConfig(
        width=D,
        num_heads=1,
        num_kv_heads=1,
        num_experts=E,
        experts_per_token=K,
        sigmoid_router=True,
        expert_groups=4,
        chosen_groups=2,
        expert_scale=1.5,
        param_dtype=jnp.float64,
    )
    router = filled(lambda: Router(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    kernel, correction = rng.standard_normal((D, E)), rng.standard_normal(E) * 0.3
    router.kernel.set_value(jax.device_put(kernel))
    router.correction.set_value(jax.device_put(correction))
    x_ND = rng.standard_normal((N, D))
    route = nnx.jit(lambda router, x_ND: router(x_ND))
    weight_NK, expert_NK, _ = map(np.asarray, route(router, x_ND)[:3])
    changed = 0
    for x, weights, experts in zip(x_ND, weight_NK, expert_NK, strict=True):
        score = 1 / (1 + np.exp(-x @ kernel))
        ranked = score + correction
        groups = np.argsort(ranked.reshape(4, 2).sum(1))[-2:]
        allowed = [e for e in range(E) if e // 2 in groups]
        want = sorted(allowed, key=lambda e, ranked=ranked: -ranked[e])[:K]
        changed += set(want) != set(np.argsort(ranked)[-K:])
        assert experts.tolist() == want
        np.testing.assert_allclose(weights, 1.5 * score[want] / score[want].sum())
    assert changed > 3  # the groups matter


@pytest.mark.slow  # test_experts_and_padding.py has the balance
@pytest.mark.parametrize("normalized", [True, False])
def test_experts_and_their_balance_are_those_of_a_loop_over_experts(x64, normalized):
    E, K, D, F, N = 5, 2, 8, 6, 21
    config = LlamaConfig(
        width=D,
        hidden=F,
        num_heads=1,
        num_kv_heads=1,
        num_experts=E,
        experts_per_token=K,
        normalized_experts=normalized,
        param_dtype=jnp.float64,
    )
    moe = filled(lambda: MixtureOfExperts(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x_BTD = jax.device_put(rng.standard_normal((3, 7, D)))
    out_BTD = jax.device_put(rng.standard_normal((3, 7, D)))
    graphdef, params = nnx.split(moe)
    params = jax.tree.map(
        lambda x: x + jax.device_put(rng.standard_normal(x.shape)), params
    )

    def grouped(params, x_BTD):
        y_BTD, load = nnx.merge(graphdef, params)(x_BTD)
        loads = jax.tree.map(lambda x: x[None], load)
        return jnp.sum(y_BTD * out_BTD), load_balancing_loss(loads, N).compute()

    def looped(params, x_BTD):
        weights = {name: part["kernel"] for name, part in params.items()}
        x_ND = x_BTD.reshape(N, D)
        logits_NE = x_ND @ weights["router"]
        probability_NE = jnp.exp(logits_NE)
        probability_NE /= probability_NE.sum(1, keepdims=True)
        kth_N1 = jnp.sort(probability_NE, axis=1)[:, -K][:, None]
        chosen_NE = probability_NE >= kth_N1
        gate_NE = jnp.where(chosen_NE, probability_NE, 0)
        if normalized:
            gate_NE /= gate_NE.sum(1, keepdims=True)
        y_ND = jnp.zeros((N, D))
        for e in range(E):
            gate_NF, up_NF = x_ND @ weights["gate"][e], x_ND @ weights["up"][e]
            hidden_NF = gate_NF / (1 + jnp.exp(-gate_NF)) * up_NF
            y_ND += gate_NE[:, e : e + 1] * (hidden_NF @ weights["down"][e])
        fraction_E = chosen_NE.astype(jnp.float64).mean(0)
        balance = E * jnp.sum(fraction_E * probability_NE.mean(0))
        return jnp.sum(y_ND.reshape(x_BTD.shape) * out_BTD), balance

    def gradients(i, params, x_BTD):
        of = lambda fn: jax.value_and_grad(lambda *x: fn(*x)[i], argnums=(0, 1))
        value, (of_params, of_x) = of(grouped)(params, x_BTD)
        want = of(looped)(nnx.to_pure_dict(params), x_BTD)
        return (value, (nnx.to_pure_dict(of_params), of_x)), want

    # All in one program, which takes no longer to compile than two of them.
    run = jax.jit(lambda *args: [gradients(i, *args) for i in range(2)])
    for got, want in run(params, x_BTD):
        errors = jax.tree.map(parity.error, got, want)
        assert max(jax.tree.leaves(errors)) <= 1e-9


@pytest.mark.slow
def test_experts_are_gathered_once_forward_once_backward_and_scattered_once():
    L, E, D, F = 3, 8, 16, 24
    config = LlamaConfig(**(SMALL | EXPERTS), balance_weight=0.1)
    tx = optax.sgd(0.1)
    fsdp = jshard.FSDP(
        parity.make_mesh(1, 8), jshard.Policy(min_shard_elements=0, remat="full")
    )
    state = fsdp.abstract_state(lambda rngs: Llama(config, rngs=rngs), tx)
    batch = {
        name: jax.ShapeDtypeStruct((16, 8), dtype)
        for name, dtype in (
            ("inputs", jnp.int32),
            ("targets", jnp.int32),
            ("weights", jnp.float32),
        )
    }
    text = hlo.compile(fsdp.train_step(loss_fn, tx).lower(state, batch)).as_text()
    found = Counter()
    for collective in hlo.collectives(text):
        full, other = collective.results, collective.operands
        if collective.kind == "reduce-scatter":
            full, other = other, full
        for array in full:
            if sorted(array.shape)[-3:] == sorted((E, D, F)):
                found[collective.kind] += collective.times
    assert found == {"all-gather": 3 * L * 2, "reduce-scatter": 3 * L}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_width": 7}, "head_width=7 must be even"),
        ({"pattern": "fx"}, "pattern='fx' must consist of"),
        ({"pattern": "s"}, "pattern='s' needs a window"),
        ({"rope_scaling": "ntk"}, "rope_scaling='ntk' is unknown: use none, linear"),
        ({"activation": "relu"}, "activation='relu' is unknown: use silu, gelu_tanh"),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 must be"),
        ({"num_experts": 8, "expert_groups": 3}, "expert_groups=3 must divide num_exp"),
        (
            {**GROUPS, "chosen_groups": 1},
            "chosen_groups=1 have 2 experts, fewer than experts_per_token=3",
        ),
        ({"dense_layers": 1}, "dense_layers=1 needs num_experts"),
        ({**GROUPS, "dense_layers": 3}, "needs dense_hidden and more layers"),
        ({"shared_hidden": 8}, "shared_hidden=8 needs num_experts"),
        ({"num_experts": 4, "correction_rate": 0.1}, "needs sigmoid_router=True"),
        ({"pre_norms": False}, "pre_norms=False needs post_norms=True"),
        ({"q_rank": 4}, "q_rank=4 needs kv_rank"),
        ({**LATENTS, "sinks": True}, "kv_rank=12 is without sinks=True"),
        ({"kv_rank": 4}, "kv_rank=4 needs rotary_width and value_width"),
        ({"rotary_width": 3}, "rotary_width=3 must be even"),
        ({"joint_qk_norm": True}, "joint_qk_norm=True needs qk_norm=True"),
    ],
)
def test_an_option_without_a_meaning_is_a_users_error(options, message):
    with pytest.raises(jshard.UserError, match=message):
        LlamaConfig(**SMALL | options)
