"""Corrections of sigmoid routers, which even out the load without a loss.

DeepSeek-V3's auxiliary-loss-free balancing: a step of ``rate`` a step, by the load of
the whole batch, as on one device whatever the mesh and the number of micro-batches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.models.llama_config import LlamaConfig
from jshard.models.moe import Load, Router, correct
from split_models import batch, loss_fn, start, trains_alike

CASES: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1, "accumulate": 4},
    "micro-batches": {"devices": 2, "accumulate": 2},
    "experts": {"expert": 4, "remat": "full"},
    "three devices": {"context": 3, "devices": 3, "accumulate": 8},
    "root": {"devices": 4, "fsdp": 2, "context": 2, "reshard_root": True},
    "six devices": {"context": 3, "devices": 6, "remat": "none", "accumulate": 4},
    "all axes": {"replica": 2, "expert": 2, "tensor": 2},
    "deferred": {"replica": 2, "accumulate": 1, "defer_scatter": True, "unroll": True},
    "context": {"context": 2, "tensor": 2, "accumulate": 2, "prefetch": True},
}


pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:attention. context=. does not divide"),
]


@pytest.mark.slow  # "all at once" of test_expert_models.py
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_corrections_are_those_of_one_device_bit_for_bit(options):
    trains_alike("corrected", True, "adamw", options)


def test_experts_with_few_tokens_gain_and_those_with_many_lose():
    tokens_LE = np.array([[5, 1, 3, 3], [4, 4, 4, 5], [0, 0, 1, 0], [2, 2, 2, 2]])
    config = LlamaConfig(
        width=2,
        num_heads=1,
        num_kv_heads=1,
        num_experts=4,
        experts_per_token=1,
        sigmoid_router=True,
    )
    router = Router(config, rngs=nnx.Rngs(0))
    for name in ("correction", "tokens"):
        variable = getattr(router, name)
        variable.set_value(jnp.zeros((4, 4), variable.get_value().dtype))
    correct(router, Load(jnp.asarray(tokens_LE), jnp.zeros(())), 0.5)
    mean_L1 = tokens_LE.mean(axis=1, keepdims=True)
    want = 0.5 * np.sign(mean_L1 - tokens_LE)
    np.testing.assert_array_equal(router.correction.get_value(), want)
    assert not np.any(router.tokens.get_value())


@pytest.mark.slow  # by default, test_experts_and_padding
def test_evaluation_corrects_nothing_and_training_evens_out_the_load():
    fsdp, state, step = start("all at once", "sgd", devices=jax.devices()[:2])
    examples = fsdp.shard_batch(batch(False, 0))

    def corrections(state: Any) -> np.ndarray:
        flat = dict(nnx.to_flat_state(state.model_state))
        path = ("blocks", "experts", "router", "correction")
        return np.asarray(flat[path].get_value())

    fsdp.eval_step(loss_fn)(state, examples)
    assert not np.any(corrections(state))
    for _ in range(2):
        state, _ = step(state, examples)
    found = corrections(state)
    assert set(np.unique(np.abs(found))) <= {0, np.float32(0.05), np.float32(0.1)}
    # Most tokens prefer the first two experts at the start.
    assert np.all(found[:, :2] < 0)
    assert np.mean(found[:, 2:]) > 0


@pytest.mark.slow
def test_a_restored_run_goes_on_on_another_mesh_as_if_it_had_not_stopped(tmp_path):
    def run(state: Any, fsdp: Any, step: Any, numbers: range) -> Any:
        for number in numbers:
            state, _ = step(state, fsdp.shard_batch(batch(False, number)))
        return state

    fsdp, state, step = start("corrected", expert=2, tensor=2, accumulate=2)
    state = run(state, fsdp, step, range(2))
    with jshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
    other, abstract, other_step = start("corrected", fsdp=4, context=2)
    with jshard.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract)
    want, got = (
        nnx.filter_state(own.fetch(done.model_state), nnx.BatchStat)
        for own, done in (
            (fsdp, run(state, fsdp, step, range(2, 4))),
            (other, run(restored, other, other_step, range(2, 4))),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, want, got)
