"""The least that a step must send, beside what it is written and compiled to send."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import jshard
from decoder import MOMENTUM, Sizes, loss_fn, make_decoder
from hlo import compile
from jshard.plan import start_up
from jshard.plan.cost.traffic import count, least
from jshard.plan.hlo.program_text import parse
from jshard.sharding.settings.mesh import BATCH

SIZES = Sizes(layers=3)
HEAD = 4 * SIZES.width * SIZES.vocab * 7 // 8  # bytes that one gather of it brings
NAMES = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "int32": "s32"}


def traced_step(policy: jshard.Policy, replica: int = 1) -> tuple[Any, Any, Any]:
    mesh = jshard.make_mesh(replica=replica)
    fsdp = jshard.FSDP(mesh, policy)
    state = fsdp.abstract_state(make_decoder(SIZES), MOMENTUM)
    shape = (16 * policy.accumulate, SIZES.length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BATCH))
    step = fsdp.train_step(loss_fn, MOMENTUM)
    return mesh, state, step.trace(state, {"tokens": tokens, "targets": tokens})


def sharded(**knobs: Any) -> jshard.Policy:
    """Matrices are sharded, vectors are not (but the head's, which nothing reads)."""
    return jshard.Policy(min_shard_elements=64, **knobs)


def nine_matrices(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(
        jshard.Unit(nnx.Linear(64, 16, use_bias=False, rngs=rngs)),
        jshard.Stack(lambda rngs: nnx.Linear(16, 16, rngs=rngs), 8, rngs=rngs),
    )


@pytest.mark.core
def test_the_least_of_a_known_step_is_its_closed_form():
    policy = sharded(accumulate=3)
    mesh = jshard.make_mesh(replica=4)  # shards of two devices
    state = jshard.FSDP(mesh, policy).abstract_state(nine_matrices, MOMENTUM)
    once, layers = 4 * 64 * 16, 4 * 8 * 16 * 16  # bytes of the parameters
    # Each micro-batch gathers, gathers layers again, and scatters: the other half. The
    # sum over replicas brings 2 (n - 1)/n of a shard, once. Biases are on each device.
    assert least(mesh, policy, state, prefetch=False) == {
        ("all-gather", "f32"): 3 * (once + 2 * layers) // 2,
        ("reduce-scatter", "f32"): 3 * (once + layers) // 2,
        ("all-reduce", "f32"): (once + layers) // 2 * 2 * 3 // 4,
    }
    # The last layer's weights are still there when the backward of prefetch begins.
    ahead = least(mesh, policy, state, prefetch=True)
    assert ahead["all-gather", "f32"] == 3 * (once + 15 * layers // 8) // 2
    whole = sharded(accumulate=3, reshard_after_forward=False)
    kept = least(mesh, whole, state, prefetch=False)
    assert kept["all-gather", "f32"] == 3 * (once + layers) // 2


# Above are the others' least, and in test_start_up.py what is written for them.
@pytest.mark.quick("knobs4", "knobs6")
@pytest.mark.parametrize(
    ("knobs", "replica", "again"),
    [
        ({}, 1, 1),
        ({"accumulate": 2}, 1, 2),
        ({"prefetch": True, "first_k": 2, "remat": "dots"}, 1, 1),
        ({"reshard_after_forward": False}, 1, 0),
        ({"reshard_after_forward": 2}, 1, 4 / 7),
        ({"defer_scatter": True, "accumulate": 2}, 1, 0),
        ({"precision": jshard.Precision(gather="bfloat16")}, 1, 1 / 2),
        ({"precision": jshard.Precision(reduce="bfloat16", sum="float32")}, 1, 1),
        ({}, 2, 6 / 7),
    ],
)
def test_a_step_sends_the_least_and_gathers_a_unit_again_for_its_backward(
    knobs, replica, again
):
    policy = sharded(**knobs)
    mesh, state, traced = traced_step(policy, replica)
    written = start_up.traffic(traced.jaxpr.jaxpr, dict(mesh.shape))
    found = {(k, NAMES[dtype]): t.wire_bytes for (k, dtype), t in written.items()}
    needed = least(mesh, policy, state, prefetch=False)
    gathers = sum(size for (kind, _), size in needed.items() if kind == "all-gather")
    gathered = sum(size for (kind, _), size in found.items() if kind == "all-gather")
    assert gathered == pytest.approx(gathers + again * HEAD, abs=8)
    for key, size in needed.items():
        if key[0] == "reduce-scatter":
            assert found[key] == size
        elif key[0] != "all-gather":  # beside those of vectors, and rows of embeddings
            assert found[key] >= size


def test_one_byte_gathers_send_no_less_than_the_values_without_their_scales():
    policy = sharded(precision=jshard.Precision(gather="int8"))
    mesh, state, traced = traced_step(policy)
    written = start_up.traffic(traced.jaxpr.jaxpr, dict(mesh.shape))
    needed = least(mesh, policy, state, prefetch=False)
    values = written["all-gather", "int8"].wire_bytes
    # The head again, and the embedding's table: in one byte it is less than the rows.
    assert values == needed["all-gather", "s8"] + 2 * HEAD // 4


def test_a_mesh_without_shards_needs_nothing():
    mesh = jshard.make_mesh(replica=8)
    state = jshard.FSDP(mesh, sharded()).abstract_state(nine_matrices, MOMENTUM)
    assert least(mesh, sharded(), state, prefetch=False) == {}


@pytest.mark.slow  # test_start_up.py has a program of replicas and micro-batches
def test_the_compiled_program_sends_what_is_written():
    mesh, _, traced = traced_step(sharded())
    written = start_up.traffic(traced.jaxpr.jaxpr, dict(mesh.shape))
    module = parse(compile(traced.lower()).as_text())
    compiled = {(row.kind, row.dtype): row for row in count(module, mesh.size, None)}
    for kind in ("all-gather", "reduce-scatter"):
        row = compiled[kind, "f32"]
        assert row.bytes == written[kind, "float32"].wire_bytes
        assert row.group == 8
