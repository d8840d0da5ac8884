"""Sequences, features and experts split over processes, and within them."""

import functools
from typing import Any

import numpy as np
import optax
import pytest

import jshard
from jshard.models.llama import Llama, LlamaConfig
from jshard.sharding.layout.batch import rows_of_process
from processes import Processes

TIME, EXAMPLES = 32, 8


def make_model(num_experts: int, rngs: Any) -> Llama:
    config = LlamaConfig(
        vocab_size=40,
        num_layers=2,
        num_heads=8,
        num_kv_heads=8,
        width=32,
        hidden=32,
        sequence_length=TIME,
        num_experts=num_experts,
        expert_capacity=0.5,  # so that there are further rounds
    )
    return Llama(config, rngs=rngs)


def loss_fn(model: Any, batch: Any) -> Any:
    tokens = batch["tokens"]
    return model.loss(tokens, tokens, batch["weights"])


def losses(num_experts: int = 0, **mesh: Any) -> list[float]:
    """Trains for three steps; every process reads what its devices' rows are."""
    fsdp = jshard.FSDP(
        jshard.make_mesh(**mesh),
        jshard.Policy(min_shard_elements=0),
        sequences=("tokens", "weights"),
    )
    tx = optax.sgd(0.1)
    model = functools.partial(make_model, num_experts)
    state, step = fsdp.init(model, tx), fsdp.train_step(loss_fn, tx)
    part, parts = rows_of_process(fsdp.mesh)

    def own(whole: dict[str, np.ndarray]) -> Any:
        size = EXAMPLES // parts
        rows = slice(part * size, (part + 1) * size)
        return fsdp.shard_batch({name: x[rows] for name, x in whole.items()})

    found, batch = [], None
    for number in range(3):
        rng = np.random.default_rng(number)
        whole = {
            "tokens": rng.integers(0, 40, (EXAMPLES, TIME)),
            "weights": (rng.random((EXAMPLES, TIME)) < 0.7).astype(np.float32),
        }
        batch = own(whole)
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    found.append(fsdp.eval_step(loss_fn)(state, batch).compute()["loss"])
    return [*found, parts]


@pytest.mark.slow
def test_two_processes_split_sequences_and_features_across_and_within_them(tmp_path):
    want = losses()
    assert want[-1] == 1
    with Processes(2, 4, tmp_path) as processes:
        for mesh, parts in (
            ({"context": 8}, 1),  # both read the same examples
            ({"context": 2, "replica": 2}, 2),
            ({"context": 4}, 2),
            ({"tensor": 8}, 1),
            ({"tensor": 2, "context": 2}, 2),
            ({"tensor": 4, "replica": 2}, 2),
        ):
            for found in processes.call(losses, **mesh):
                np.testing.assert_allclose(found[:-1], want[:-1], rtol=2e-6)
                assert found[-1] == parts


@pytest.mark.slow
def test_two_processes_split_experts_across_and_within_them(tmp_path):
    want = losses(num_experts=8)
    with Processes(2, 4, tmp_path) as processes:
        for mesh in ({"expert": 8}, {"expert": 4}, {"expert": 2, "context": 2}):
            for found in processes.call(losses, num_experts=8, **mesh):
                np.testing.assert_allclose(found[:-1], want[:-1], rtol=2e-6)
                assert found[-1] == 2  # each process reads its examples
