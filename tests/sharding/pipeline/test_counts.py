"""What a pipelined step sends, gathers and keeps, counted."""

import collections
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from jshard.plan.start_up import traffic
from jshard.sharding.layout.batch import abstract_batch
from jshard.sharding.pipeline.schedule import one_forward_one_backward
from jshard.system.compat.jaxprs import has, nested
from pipelines import Layers, mean, mesh_of, policy_of


def traced(mesh: Any, policy: jshard.Policy, variant: parity.Variant) -> Any:
    """The traced step of ``Sharded``, on one of its batches."""
    fsdp, tx = jshard.FSDP(mesh, policy), optax.sgd(0.1)

    def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> Any:
        terms, _ = parity.sums(variant, model, batch)
        return sum(weight * jshard.Mean(*mean) for weight, *mean in terms)

    state = fsdp.abstract_state(parity.make_model(variant, False), tx)
    batch = abstract_batch(next(parity.batches(variant)), mesh)
    return fsdp.train_step(loss_fn, tx).trace(state, batch)


def counts(mesh: Any, policy: jshard.Policy, layers: int) -> dict[tuple, tuple]:
    step = traced(mesh, policy, parity.Variant(layers=layers))
    found = traffic(step.jaxpr.jaxpr, dict(mesh.shape))
    return {kind: (x.count, x.wire_bytes) for kind, x in found.items()}


BLOCK, OUTSIDE = 6, 5  # parameters of a layer, and of all else
WIDTH, HIDDEN, WORDS = 16, 32, parity.VOCABULARY


KEPT = {"reshard_after_forward": False}
COUNTED = {
    "a gather each time": {},
    "one": {"defer_scatter": True},
    "one of layers": KEPT,
    "interleaved": {"stages_per_device": 2},
    "interleaved, one": {"stages_per_device": 2} | KEPT,
}


@pytest.mark.usefixtures("x64")
@pytest.mark.quick("interleaved, one")
@pytest.mark.parametrize("fields", COUNTED.values(), ids=COUNTED)
def test_counts_are_those_of_a_device_and_of_moves(fields):
    got = counts(mesh_of(pipe=2, fsdp=2), policy_of(4, **fields), layers=4)
    alone = {key: x for key, x in fields.items() if key != "stages_per_device"}
    # A device, that were both ends.
    both, one = (
        counts(mesh_of(fsdp=2), policy_of(4, **alone), layers=n) for n in (2, 1)
    )
    layer = 2 * WIDTH * HIDDEN + HIDDEN + 3 * WIDTH
    outside = 2 * WORDS * WIDTH + 2 * WIDTH + WORDS
    # A stage's device has half of what it is sent already: parameters, then gradients.
    to_stages, outside = 2 * layer * 8 // 4, outside * 8 // 4

    def expected(kind: str) -> tuple[int, int]:
        count, nbytes = both.get((kind, "float64"), (0, 0))
        if kind != "all-to-all" and fields.get("reshard_after_forward") is False:
            count += BLOCK - 2 * (count - one[kind, "float64"][0])
            nbytes += layer * 8 - 2 * (nbytes - one[kind, "float64"][1])
        return count, nbytes

    gathers, gathered = expected("all-gather")
    scatters, scattered = expected("reduce-scatter")
    exchanges, exchanged = expected("all-to-all")
    weights = 16 * parity.TIME * 8 // 2
    stages = fields.get("stages_per_device", 1)
    parts = 2 if stages == 1 else 1  # of a backward: at most a stage's layers
    sends = 2 * (4 * stages + 2 - 1) * (1 + parts)
    carry = 32 // 2 // 4 * parity.TIME * WIDTH * 8
    found = {kind: got[kind, "float64"] for kind, of in got if of == "float64"}
    assert found | {"ids": got["all-gather", "int64"]} == {
        "all-gather": (gathers + OUTSIDE + 1, gathered + outside + weights),
        "reduce-scatter": (scatters + OUTSIDE, scattered + outside),
        "all-to-all": (exchanges + 2 * BLOCK, exchanged + 2 * to_stages),
        "send": (sends, sends * carry),
        "ids": (2, 2 * weights),
    }


@functools.cache
def step_of_layers() -> Any:
    """The program of a step in two stages, whose loss is one Mean."""
    fsdp, tx = jshard.FSDP(mesh_of(pipe=2, fsdp=2), policy_of(2)), optax.sgd(0.1)
    state = fsdp.abstract_state(Layers, tx)
    batch = abstract_batch(jax.ShapeDtypeStruct((8, 8), np.float32), fsdp.mesh)
    return fsdp.train_step(mean, tx).trace(state, batch).jaxpr.jaxpr


def test_a_count_of_the_loss_is_summed_once_in_a_stage_and_not_over_stages():
    psums = [x for x in nested(step_of_layers().eqns) if "psum" in x.primitive.name]
    summed = collections.Counter(
        (x.params["axes"], var.aval.dtype.kind) for x in psums for var in x.invars
    )
    devices = ("replica", "fsdp")
    count, total = (devices, "i"), (devices, "f")
    assert summed == {count: 1, total: 1, (("pipe",), "f"): 1}


def test_a_tick_waits_for_the_one_before_to_gather_its_weights():
    """Without a barrier XLA could gather them ahead of all ticks, and keep them."""
    (ticks,) = [
        eqn.params["jaxpr"].jaxpr
        for eqn in nested(step_of_layers().eqns)
        if eqn.primitive.name == "scan" and has(eqn, {"ppermute"})
    ]
    (fixed,) = [x for x in ticks.eqns if x.primitive.name == "optimization_barrier"]
    # Two parameters of the layers, two of the head, and the row of the schedule.
    assert len(fixed.invars) == 5
    (branch,) = [x for x in ticks.eqns if has(x, {"all_gather"})]
    shards = {(2, 4, 8), (2, 4)}  # of two layers
    given = [x for x in branch.invars if x.aval.shape in shards]
    assert {x.aval.shape for x in given if x in fixed.outvars} == shards


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_no_more_micro_batches_are_alive_than_stages():
    """By XLA's account, of twice as many as without need."""
    rows, number = 64, 8

    def temporaries(stages: int, micro: int, **fields: int) -> int:
        variant = parity.Variant(layers=4 * stages, batch=rows * micro)
        policy = policy_of(micro, **fields)
        step = traced(mesh_of(pipe=stages, fsdp=1), policy, variant)
        return step.lower().compile().memory_analysis().temp_size_in_bytes

    carry = rows * parity.TIME * WIDTH * 8
    two, many, four = temporaries(2, 4), temporaries(2, number), temporaries(4, number)
    assert many - two < carry  # but for the tokens of a longer batch
    # Each of two more micro-batches keeps the inputs of a stage's four layers.
    assert 2 * 3.5 * carry < four - many < 2 * 4.5 * carry
    assert one_forward_one_backward(4, number, 3).activations == 4
    # Interleaved, each keeps the inputs of two layers, and six more are alive.
    two, many, four = (
        temporaries(stages, micro, stages_per_device=2)
        for stages, micro in ((2, 4), (2, number), (4, number))
    )
    kept = [one_forward_one_backward(p, number, 2, 2).activations for p in (2, 4)]
    assert kept == [5, 11]
    assert many - two < carry
    assert 6 * 1.75 * carry < four - many < 6 * 2.25 * carry
