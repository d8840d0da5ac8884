"""Padding is in no expert's load: neither in the balance loss nor in corrections."""

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
from filled import filled
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.moe import without_padding
from jshard.recipes import preference

E, V, LONG, SHORT = 4, 32, 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "sequence_length": LONG,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "width": 8,
    "hidden": 8,
    "num_experts": E,
    "experts_per_token": 2,
    "balance_weight": 0.5,
    "attention": "blockwise",
    "dtype": jnp.float64,
    "param_dtype": jnp.float64,
}
CORRECTED = {"sigmoid_router": True, "correction_rate": 0.01}


@functools.cache
def made(corrected: bool) -> Any:
    config = LlamaConfig(**SIZES | (CORRECTED if corrected else {}))
    return filled(lambda: Llama(config, rngs=nnx.Rngs(0)))


def rows(places: int) -> dict[str, Any]:
    """Chats of 8 tokens, whose first have no weight, and padding of token 0."""
    rng = np.random.default_rng(0)
    chats = rng.integers(1, V, (6, SHORT + 1))
    names = "inputs", "targets", "segments", "positions"
    found: dict[str, Any] = {name: np.zeros((8, places), np.int32) for name in names}
    found["inputs"][:6, :SHORT], found["targets"][:6, :SHORT] = (
        chats[:, :-1],
        chats[:, 1:],
    )
    found["segments"][:6, :SHORT] = 1
    found["positions"][:6, :SHORT] = np.arange(SHORT)
    found["weights"] = np.zeros((8, places))
    found["weights"][:6, 3:SHORT] = 1
    found["weights"][4, :SHORT] = np.arange(SHORT) > 5  # devices have other numbers
    return found


def loss_fn(model: Any, batch: Any) -> Any:
    packed = {"segment_ids_BT": batch["segments"], "positions_BT": batch["positions"]}
    return model.loss(batch["inputs"], batch["targets"], batch["weights"], **packed)


@functools.cache
def without_jshard(corrected: bool) -> Any:
    """One device's loss, gradients and corrections of the six chats, no padding."""
    whole = {name: jax.device_put(x[:6]) for name, x in rows(SHORT).items()}
    graphdef, params, rest = nnx.split(made(corrected), nnx.Param, ...)

    def loss(params: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        weights, out = whole["weights"], model.features(whole["inputs"])
        log_probs = jax.nn.log_softmax(out.x_BTD @ out.head_DV)
        of_targets = jnp.take_along_axis(log_probs, whole["targets"][..., None], -1)
        value = -jnp.sum(weights * of_targets[..., 0]) / jnp.sum(weights)
        router = model.blocks.experts.router
        corrections = router.correction.get_value() if corrected else None
        return value + out.penalty.compute(), corrections

    (value, corrections), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params
    )
    return value, parity.by_path(grads), corrections


CASES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "experts, context": {"expert": 2, "context": 2, "fsdp": 2},
    "tensor": {"tensor": 2, "replica": 2, "fsdp": 2},
}


@pytest.mark.quick("experts, context-True")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("mesh", CASES.values(), ids=CASES)
def test_a_step_with_padding_is_the_step_without_it(mesh, corrected):
    want, grads, corrections = without_jshard(corrected)
    policy = jshard.Policy(min_shard_elements=0)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy, sequences=tuple(rows(LONG)))
    tx = optax.sgd(1.0)
    state = fsdp.from_model(made(corrected), tx)
    before = parity.by_path(fsdp.fetch(state.params))
    state, metrics = fsdp.train_step(loss_fn, tx)(state, fsdp.shard_batch(rows(LONG)))
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-9)
    after = parity.by_path(fsdp.fetch(state.params))
    moved = {path: before[path] - after[path] for path in before}
    assert parity.worst(moved, grads) <= 1e-9
    if corrected:
        found = nnx.filter_state(fsdp.fetch(state.model_state), nnx.BatchStat)
        (found,) = jax.tree.leaves(found)
        np.testing.assert_array_equal(found, corrections)
        assert np.any(corrections)


def test_what_a_loss_does_not_depend_on_is_padding():
    weights_BT = np.array([[0, 0, 1, 0, 0, 0.5, 0, 0], [0, 1, 0, 0, 0, 0, 1, 0]])
    segments_BT = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 3, 3, 3, 0]])
    rows_BT = without_padding(jax.device_put(weights_BT))
    np.testing.assert_array_equal(rows_BT, [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 7 + [0]])
    found_BT = without_padding(jax.device_put(weights_BT), jax.device_put(segments_BT))
    want_BT = [[1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 1, 0]]
    np.testing.assert_array_equal(found_BT, want_BT)
    assert not np.any(without_padding(jnp.zeros((2, 3))))


@pytest.mark.usefixtures("x64")
def test_a_preference_is_balanced_without_padding():
    rng = np.random.default_rng(0)

    model = made(False)

    def penalty(places: int) -> Any:
        tokens = np.zeros((2, 2, LONG + 1), int)
        tokens[..., : SHORT + 1] = rng.integers(1, V, (2, 2, SHORT + 1))
        tokens = tokens[..., : places + 1].swapaxes(1, 2)
        is_text = np.broadcast_to(np.arange(places)[:, None] < SHORT, (places, 2))
        of_all = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "texts": np.stack([is_text] * len(tokens)),
            "answers": np.stack([is_text] * len(tokens)),
        }
        batch = {
            name: jax.device_put(x.reshape(len(x), -1)) for name, x in of_all.items()
        }
        return jax.jit(lambda: preference.read(model, batch)[2].compute())()

    want = penalty(SHORT)
    rng = np.random.default_rng(0)
    np.testing.assert_allclose(penalty(LONG), want, rtol=1e-12)
