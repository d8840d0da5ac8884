"""Whole models whose experts are split over devices: `make_mesh(expert=)`."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from jshard.plan.start_up import describe, traffic
from jshard.sharding.axes import experts
from jshard.sharding.axes.experts import capacities
from split_models import MODELS, TIME, batch, loss_fn, made, start, trains_alike

# model, packed, optimizer, and options
CASES = {
    "all at once": (
        "all at once",
        True,
        "sgd",
        {
            "fsdp": 1,
            "context": 2,
            "tensor": 2,
            "expert": 2,
            "accumulate": 2,
            "remat": "none",
        },
    ),
    "fsdp": ("uneven experts", True, "adamw", {"expert": 4, "remat": "full"}),
    "all devices": ("uneven experts", False, "sgd", {"expert": 8, "remat": "none"}),
    "replicas": (
        "experts",
        True,
        "adamw",
        {"replica": 2, "expert": 2, "remat": "dots"},
    ),
    "copies": ("experts", False, "sgd", {"replica": 4, "fsdp": 1, "expert": 2}),
    "gpt-oss": ("gpt-oss", True, "adamw", {"expert": 2, "tensor": 2}),
    "deepseek": ("deepseek", False, "adamw", {"expert": 4}),
    "context": ("uneven experts", True, "adamw", {"expert": 2, "context": 2}),
    "tensor": ("uneven experts", False, "adamw", {"expert": 2, "tensor": 2}),
    "prefetch": ("uneven experts", False, "adamw", {"expert": 4, "prefetch": True}),
    "groups": ("experts", False, "adamw", {"expert": 2, "reshard_after_forward": 2}),
    "unrolled": (
        "experts",
        False,
        "muon",
        {"replica": 2, "expert": 2, "unroll": True},
    ),
    "names": (
        "uneven experts",
        True,
        "adamw",
        {"expert": 4, "remat": jshard.Names("hidden")},
    ),
    # The balance of a micro-batch is not that of the batch.
    "accumulate": (
        "uneven, not balanced",
        True,
        "adamw",
        {"expert": 2, "accumulate": 2, "devices": 4},
    ),
    "deferred": (
        "uneven, not balanced",
        False,
        "adamw",
        {"expert": 2, "tensor": 2, "accumulate": 2, "defer_scatter": True},
    ),
}


@pytest.mark.slow  # test_experts_and_padding.py trains a Llama
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_experts_train_as_whole_ones_on_one_device(case):
    trains_alike(*case)


@pytest.mark.slow  # as the tensor axis's in test_modules_named_by_path
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mesh", [{"expert": 4}, {"tensor": 2, "expert": 2}])
def test_initial_values_are_those_of_the_plain_model(mesh):
    fsdp, _, _ = start("uneven experts", **mesh)
    state = fsdp.init(MODELS["uneven experts"], optax.sgd(0.1))
    want = nnx.state(made("uneven experts"), nnx.Param)
    got = parity.by_path(fsdp.fetch(state.params))
    assert parity.worst(got, parity.by_path(want)) <= 1e-12


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options", [{"remat": "full"}, {"replica": 2, "unroll": True}, {"tensor": 2}]
)
def test_whole_experts_train_in_rounds_as_on_gpus(options, monkeypatch):
    monkeypatch.setattr(experts, "on_gpus", lambda: True)
    trains_alike("uneven experts", True, "adamw", options)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_tokens_move_and_experts_do_not():
    def moved(**mesh):
        fsdp, state, train_step = start("uneven experts", remat="full", **mesh)
        shards = fsdp.shard_batch(batch(False, 0))
        jaxpr = train_step.trace(state, shards).jaxpr.jaxpr
        return traffic(jaxpr, dict(fsdp.mesh.shape))

    split, whole = moved(expert=4), moved()
    layers, E, width, hidden = 2, 8, 16, 32

    def of_each(found, *kinds):
        return sum(found[kind, "float64"].wire_bytes for kind in kinds)

    rows, _ = capacities(TIME * 2, E, 0.3)
    exchanged = E // 4 * 3 * rows * (5 * width + 3) * 8
    looked_up = of_each(whole, "all-to-all")
    assert of_each(split, "all-to-all") - looked_up == layers * exchanged
    gathered = 3 * E * width * hidden * 3 // 4 * (2 * 8 + 8)
    kinds = "all-gather", "reduce-scatter"
    assert of_each(whole, *kinds) - of_each(split, *kinds) == layers * gathered


@pytest.mark.slow
def test_the_note_compares_tokens_with_experts():
    fsdp, state, train_step = start("experts in float32", expert=4, remat="full")
    shards = fsdp.shard_batch(batch(False, 0))
    (line,) = [
        line
        for line in describe(fsdp, state, shards, train_step).splitlines()
        if line.startswith("experts")
    ]
    assert (
        "split over 4 devices: exchanging tokens moves 31.1 KiB per device and step;"
        in line
    )
    assert line.endswith("gathering all experts would move 216.0 KiB")


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_evaluation_and_predictions_are_those_without_the_axis():
    def results(**mesh):
        fsdp, state, _ = start("uneven experts", **mesh)
        examples = batch(True, 0)
        means = fsdp.eval_step(loss_fn)(state, fsdp.shard_batch(examples))
        predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
        inputs = fsdp.shard_examples({"inputs": examples["inputs"]})
        return means.compute()["loss"], fsdp.fetch(predict(state, inputs))

    for got, want in zip(results(expert=4), results(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.slow
def test_checkpoints_go_from_any_mesh_to_any_other_bit_for_bit(tmp_path):
    fsdp, state, train_step = start("experts in float32")
    state, _ = train_step(state, fsdp.shard_batch(batch(False, 0)))
    want = fsdp.fetch(state)
    meshes = [{"expert": 4}, {"replica": 2, "expert": 2}, {"expert": 8}, {}]
    for number, mesh in enumerate(meshes):
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(state)
        other, abstract, _ = start("experts in float32", **mesh)
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            state = checkpointer.restore(abstract)
        pairs = zip(*map(jax.tree.leaves, (other.fetch(state), want)), strict=True)
        for got, expected in pairs:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_the_axis_costs_no_memory_of_the_state():
    def bytes_a_device(**mesh):
        _, state, _ = start("experts in float32", **mesh)
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return sum(x.addressable_shards[0].data.nbytes for x in leaves)

    assert bytes_a_device(expert=4) == bytes_a_device(fsdp=8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("experts", r"expert=8 does not divide .*experts"),
        ("llama", "expert=8, but Llama declares nothing that this axis splits"),
    ],
)
def test_models_that_the_axis_does_not_split_are_refused_in_one_line(model, message):
    fsdp = jshard.FSDP(jshard.make_mesh(expert=8))
    with pytest.raises(jshard.UserError, match=message):
        fsdp.init(MODELS[model], optax.sgd(0.1))
