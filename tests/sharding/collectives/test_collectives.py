"""Every collective of a step is counted in the compiled program: no other runs."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hlo
import jshard
from decoder import (
    MOMENTUM,
    OPTIMIZERS,
    RECOMPUTED,
    REMATS,
    TABLE,
    Sizes,
    check_counts,
    check_found,
    counted,
    expected,
    local_tokens,
    loss_fn,
    lower_step,
    lower_update,
    make_decoder,
    make_fsdp,
    policies,
)
from jshard.models.gpt import GPT, GPTConfig
from parity import every_pair

SIZES = Sizes()


class Layer(nnx.Linear):
    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return super().__call__(inputs).astype(inputs.dtype)


class Layers(nnx.Module):
    """A Stack and nothing else."""

    def __init__(self, rngs: nnx.Rngs):
        layer = lambda rngs: Layer(16, 16, rngs=rngs)
        self.layers = jshard.Stack(layer, 2, rngs=rngs)


def lower_layers(fsdp: jshard.FSDP) -> jax.stages.Lowered:
    def squared(model: Layers, x: jax.Array) -> jshard.Mean:
        return jshard.Mean(jnp.sum(model.layers(x) ** 2), x.size)

    tx, batch = optax.sgd(0.1), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return fsdp.train_step(squared, tx).lower(fsdp.abstract_state(Layers, tx), batch)


@pytest.mark.quick("True-dots")
@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_layers_without_a_loop_run_the_collectives_of_a_loop(prefetch, remat):
    found = []
    for unroll in (False, True):
        policy = policies(remat=remat, prefetch=prefetch, unroll=unroll)
        lowered = lower_layers(make_fsdp(policy))
        found.append(counted(hlo.collectives(hlo.compile(lowered).as_text())))
    assert found[0] == found[1]
    assert {kind for kind, *_ in found[0]} == {"all-gather", "reduce-scatter"}


@functools.cache
def compiled_step(replica: int) -> tuple[jshard.FSDP, jshard.TrainState, list]:
    """(FSDP, abstract state, collectives) of the step with all else as it is."""
    fsdp = make_fsdp(policies(remat="full"), replica=replica)
    lowered, state = lower_step(fsdp, SIZES)
    return fsdp, state, hlo.collectives(hlo.compile(lowered).as_text())


@pytest.mark.core
def test_layers_gather_twice_per_step_and_scatter_once():
    check_found(*compiled_step(2), RECOMPUTED)


@pytest.mark.slow  # by default, layers without a loop and test_plan_traffic.py
@pytest.mark.parametrize("plain", [False, True])
@every_pair(
    remat=tuple(REMATS),
    reshard=(True, False),
    accumulate=(1, 4),
    replica=(1, 2, 8),
)
def test_each_unit_gathers_once_a_pass_and_scatters_once(case, plain):
    remat, reads = REMATS[case["remat"]]
    policy = policies(
        remat=remat,
        reshard_after_forward=case["reshard"],
        accumulate=case["accumulate"],
    )
    check_counts(policy, reads, replica=case["replica"], plain=plain)


@pytest.mark.slow  # by default, the bytes of all sums, below
@pytest.mark.parametrize("replica", [1, 2])
def test_replicated_parameters_are_only_all_reduced(replica):
    # Norms and the bias of "up" are; the accumulated gradient travels once.
    policy = jshard.Policy(min_shard_elements=41, accumulate=4 // replica)
    check_counts(policy, RECOMPUTED, replica=replica)


@pytest.mark.slow  # by default, that of a frozen layer and a trained one, below
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_stack_of_one_layer_is_gathered_twice_like_any(accumulate):
    sizes = dataclasses.replace(SIZES, layers=1)
    check_counts(policies(accumulate=accumulate), RECOMPUTED, sizes=sizes)


@pytest.mark.quick("1-1-False")  # a stack of one layer, which is like any
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layers", [1, 4])
def test_frozen_parameters_are_gathered_and_never_scattered(layers, accumulate, plain):
    trained = nnx.All(nnx.Param, lambda path, _: "up" in path or "head" in path)
    policy, sizes = policies(accumulate=accumulate), Sizes(layers=layers)
    check_counts(policy, RECOMPUTED, plain=plain, sizes=sizes, wrt=trained)


def test_frozen_layers_below_all_training_have_no_backward():
    trained = nnx.All(nnx.Param, lambda path, _: "head" in path)
    check_counts(policies(remat="none"), set(), wrt=trained)


def test_evaluation_gathers_once_and_scatters_nothing():
    fsdp = make_fsdp(policies(accumulate=4))
    state = fsdp.abstract_state(make_decoder(SIZES), MOMENTUM)
    tokens = jax.ShapeDtypeStruct((32, SIZES.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    compiled = hlo.compile(fsdp.eval_step(loss_fn).lower(state, batch))
    once = make_fsdp(policies(reshard_after_forward=False))
    want = expected(once, state, set())
    want = Counter({k: runs for k, runs in want.items() if k[0] == "all-gather"})
    # The embedding's ids and rows.
    tokens = local_tokens(once)
    want |= {("all-to-all", 8, size): 1 for size in (8 * tokens, tokens * SIZES.width)}
    assert counted(hlo.collectives(compiled.as_text())) == want


@pytest.mark.quick("2")
@pytest.mark.parametrize("replica", [1, pytest.param(2, marks=pytest.mark.core)])
def test_wire_bytes_are_those_of_the_parameters_and_nothing_else(replica):
    fsdp, state, found = compiled_step(replica)
    n = 8 // replica
    sizes = {
        ".".join(map(str, path)): leaf.get_value().size
        for path, leaf in nnx.to_flat_state(state.params)
    }
    gathered = sum(size for name, size in sizes.items() if name != TABLE)
    total, again = sum(sizes.values()), sum(sizes[name] for name in RECOMPUTED)
    got = Counter()
    for c in found:
        got[c.kind, c.group, not hlo.is_number(c.operands[0])] += c.wire_bytes
    assert got["all-gather", n, True] == 4 * (gathered + again) * (n - 1) // n
    assert got["reduce-scatter", n, True] == 4 * gathered * (n - 1) // n
    # Of an embedding, for each token: its id, its row, and the gradient of that.
    exchanged = local_tokens(fsdp) * (4 * n + 2 * 4 * SIZES.width)
    assert got["all-to-all", n, True] == exchanged * (n - 1) // n
    # Twice (n - 1)/n of each shard, over two replicas.
    assert got["all-reduce", 2, True] == (replica - 1) * 4 * total // n
    assert {k for k in got if k[2]} <= {
        ("all-gather", n, True),
        ("reduce-scatter", n, True),
        ("all-to-all", n, True),
        ("all-reduce", 2, True),
    }
    scalars = sum(c.wire_bytes for c in found if hlo.is_number(c.operands[0]))
    assert scalars < 1000


@pytest.mark.quick("gather float32", "param")
@pytest.mark.parametrize(
    ("precision", "gathered", "reduced"),
    [
        (jshard.Precision(), "f32", "f32"),
        (jshard.Precision(compute="bfloat16"), "bf16", "bf16"),
        (jshard.Precision(compute="bfloat16", reduce="float32"), "bf16", "f32"),
        (jshard.Precision(gather="float32", compute="bfloat16"), "f32", "bf16"),
        (jshard.Precision(param="bfloat16", reduce="float32"), "bf16", "f32"),
    ],
    ids=["as is", "compute", "reduce", "gather float32", "param"],
)
def test_the_wire_carries_the_dtypes_asked_for(precision, gathered, reduced):
    # Counts do not depend on dtypes, and the CPU compiler makes every bf16 collective
    # an fp32 one: what is asked of it tells.
    policy = policies(precision=precision)
    text = lower_layers(make_fsdp(policy, replica=2)).as_text("hlo")

    def dtypes(kind: str) -> set[str]:
        return set(re.findall(rf"= (\w+)\[\d[^\]]*\]\S* {kind}\(", text))

    assert dtypes("all-gather") == {gathered}
    assert dtypes("reduce-scatter") == {reduced}
    # Of shards, over replicas; and the digits of a count.
    assert dtypes("all-reduce") - {"s32"} == {reduced}


class ShortGPT(GPT):
    """Its head and embedding, with layers that are compiled soon."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.blocks = Layers(rngs).layers


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [True, False])
def test_the_traffic_of_the_head_does_not_grow_with_the_chunks_of_the_loss(tied):
    fsdp = jshard.FSDP(jshard.make_mesh(), policies())
    optimizer = optax.sgd(0.1)
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)
    weights = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    # A loop over sixteen chunks.
    config = GPTConfig(
        vocab_size=72,
        sequence_length=8,
        num_layers=1,
        num_heads=2,
        width=16,
        tied=tied,
        loss_chunk=1,
    )
    state = fsdp.abstract_state(lambda r: ShortGPT(config, rngs=r), optimizer)
    step = fsdp.train_step(lambda model, batch: model.loss(*batch), optimizer)
    lowered = step.lower(state, (tokens, tokens, weights))
    traffic = counted(hlo.collectives(hlo.compile(lowered).as_text()))
    # One gather and one scatter of the head, whose weights are kept for the loop over
    # chunks. An embedding that is no head exchanges rows (of 16 tokens).
    assert traffic["all-gather", 8, 72 * 16] == 1
    assert traffic["reduce-scatter", 8, 72 * 16] == 1
    assert traffic["all-to-all", 8, 16 * 16] == (0 if tied else 2)


class OnlyLayers(nnx.Module):
    """What optimizers move for layers, and for nothing else."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.blocks = make_decoder(sizes)(rngs).blocks


@pytest.mark.quick("sgd-1", "adafactor-1", "muon-2")
@pytest.mark.parametrize("replica", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_gathers_more_than_a_layer_at_a_time(name, replica):
    sizes = Sizes(layers=8, width=64, hidden=128)
    fsdp = make_fsdp(policies(), replica=replica)
    make = lambda rngs: OnlyLayers(sizes, rngs)
    lowered, state = lower_update(fsdp, make, OPTIMIZERS[name])
    found = hlo.collectives(hlo.compile(lowered).as_text())
    matrix = 4 * sizes.width * sizes.hidden
    total = 4 * sum(x.size for x in jax.tree.leaves(state.params))
    moved = sum(c.wire_bytes for c in found)
    kinds = {c.kind for c in found}
    assert max(c.result_bytes for c in found) <= matrix
    if name == "muon":
        # What Newton-Schulz reads and writes: each device gets its layers' matrices and
        # hands back shards, of every layer 1/n in and 1/n out.
        assert kinds == {"all-to-all", "all-reduce"}
        assert moved < 2.1 * total * replica / 8
    elif name == "adafactor":
        # Rows' and columns' statistics, of each layer a vector.
        assert kinds == {"all-gather", "all-reduce"}
        assert moved < 0.05 * total
    else:
        # Norms: of everything, and for LAMB of each tensor.
        assert kinds == {"all-reduce"}
        assert moved < 0.005 * total
