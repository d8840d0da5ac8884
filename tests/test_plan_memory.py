"""A step's memory by part: derived without compiling, and as XLA assigned it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import hlo
import jshard
from decoder import Sizes, loss_fn, make_decoder, policies
from h100 import h100s
from jshard.mesh import BATCH
from jshard.plan import GPUS
from jshard.plan.memory import buffers
from jshard.plan.memory.memory import Memory, lines, memory

DEVICES, EXAMPLES = 8, 2
SIZES = Sizes(layers=16, width=256, hidden=1024, vocab=64, length=32)
ADAMW = optax.adamw(1e-3)
STREAM = EXAMPLES * SIZES.length * SIZES.width * 4  # bytes of a layer's input
HIDDEN = EXAMPLES * SIZES.length * SIZES.hidden * 4
KERNELS = 2 * SIZES.width * SIZES.hidden * 4  # bytes of a layer's matrices


def traced_step(
    policy: jshard.Policy, mesh: Any = None, sizes: Sizes = SIZES
) -> tuple[Any, Any, Any]:
    """(mesh, abstract state, traced step) of the decoder on eight devices."""
    mesh = mesh or jshard.make_mesh()
    fsdp = jshard.FSDP(mesh, policy)
    state = fsdp.abstract_state(make_decoder(sizes), ADAMW)
    shape = (DEVICES * EXAMPLES * policy.accumulate, sizes.length)
    sharding = NamedSharding(mesh, BATCH)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    batch = {"tokens": tokens, "targets": tokens}
    return mesh, state, fsdp.train_step(loss_fn, ADAMW).trace(state, batch)


def derive(policy: jshard.Policy, sizes: Sizes = SIZES, **options: Any) -> Memory:
    mesh, state, traced = traced_step(policy, sizes=sizes)
    return memory(mesh, policy, state, traced, **options)


def part(found: Memory, name: str) -> int:
    return next(part.bytes for part in found.parts if part.name == name)


# Derived, without compiling.


def test_parameters_optimizer_and_batch_are_their_shards():
    policy = policies()
    mesh, state, traced = traced_step(policy)
    found = memory(mesh, policy, state, traced)
    shards = sum(
        4 * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state.params)
    )
    assert part(found, "parameters") == shards
    # Two moments; their counters and the step's.
    assert 0 < part(found, "optimizer") - 2 * shards <= 16
    assert part(found, "batch") == 2 * EXAMPLES * SIZES.length * 4
    assert found.total == sum(p.bytes for p in found.parts)
    assert found.unexplained == 0
    assert not found.compiled


@pytest.mark.parametrize(
    ("remat", "kept"),
    [("full", STREAM), (jshard.Names("hidden"), STREAM + HIDDEN)],
    ids=["full", "names"],
)
def test_saved_activations_are_what_the_layers_keep(remat, kept):
    saved = part(derive(policies(remat=remat)), "saved activations")
    # Besides, what the root and the head keep: a few of a layer's input.
    assert SIZES.layers * kept <= saved <= SIZES.layers * kept + 4 * STREAM


def test_gathered_weights_are_few_layers_unless_they_are_kept():
    few = part(derive(policies(prefetch=False)), "gathered weights")
    assert KERNELS / 2 < few < 2 * KERNELS
    ahead = part(derive(policies(prefetch=True)), "gathered weights")
    assert 0.9 * KERNELS < ahead - few < 1.1 * KERNELS
    kept = part(derive(policies(reshard_after_forward=False)), "gathered weights")
    assert kept > SIZES.layers * KERNELS
    halves = part(derive(policies(reshard_after_forward=2)), "gathered weights")
    assert kept / 2 < halves < kept / 2 + 2 * KERNELS


def test_gradients_are_shards_unless_their_scatter_is_deferred():
    shards = SIZES.layers * KERNELS / DEVICES
    assert shards <= part(derive(policies()), "gradients") < shards + 2 * KERNELS
    summed = part(derive(policies(accumulate=2)), "gradients")
    assert 2 * shards <= summed < 2 * shards + 2 * KERNELS
    whole = part(derive(policies(defer_scatter=True)), "gradients")
    assert SIZES.layers * KERNELS <= whole < (SIZES.layers + 3) * KERNELS


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"accumulate": 2, "remat": jshard.Names("hidden")},
        *(
            pytest.param(knobs, marks=pytest.mark.slow)
            for knobs in (
                {"remat": "none", "reshard_after_forward": 2},
                {"remat": "dots", "keep_last": 8},
                {"defer_scatter": True},
            )
        ),
    ],
    ids=str,
)
def test_the_derived_total_is_near_what_a_compiled_step_needs(knobs):
    policy = policies(**knobs)
    sizes = dataclasses.replace(SIZES, layers=48)
    mesh, state, traced = traced_step(policy, sizes=sizes)
    order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    compiled = hlo.compile(traced.lower(), **order)
    found = memory(mesh, policy, state, traced, compiled=compiled)
    assert found.derived == pytest.approx(found.total, rel=0.1)
    # Without XLA's buffers the parts are the derived ones, and the rest is shown.
    assert sum(p.bytes for p in found.parts) == found.derived
    assert found.unexplained == found.total - found.derived


def test_the_table_says_whether_it_fits():
    found = derive(policies(), gpu=GPUS["h100"])
    text = lines(found)
    assert found.fits
    assert found.as_dict()["fits"]
    assert [line.split("  ")[0] for line in text] == [
        *(p.name for p in found.parts if p.bytes),
        "total",
    ]
    assert text[-1].endswith("fits in 75.2 GiB that the card leaves")
    small = dataclasses.replace(GPUS["h100"], memory=found.total)
    text = lines(derive(policies(), gpu=small))
    assert "does not fit in" in text[-1]


# XLA's buffers.


def test_overlapping_values_count_once_and_gaps_are_fragmentation(tmp_path):
    prefix = tmp_path / "module_1.step.gpu_after_optimizations"
    assignment = """BufferAssignment:
allocation 0: size 40, parameter 0, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=40,offset=0): f32[10]{0}
allocation 1: size 100, preallocated-temp:
 value: <2 a @0> (size=40,offset=0): f32[10]{0}
 value: <3 b{} @0> (size=40,offset=0): f32[10]{0}
 value: <4 c{1} (phi) @0> (size=20,offset=50): f32[5]{0}
 value: <5 d @0> (size=100,offset=0): f32[25]{0}

Total bytes used: 140
"""
    live = """HloLiveRange (max 9):
  InstructionSequence:
    0:p
  BufferLiveRange:
    a{}:1-3
    b{}:3-6
    c{1}:2-5
    d{}:8-8
"""
    prefix.with_name(f"{prefix.name}-buffer-assignment.txt").write_text(assignment)
    prefix.with_name(f"{prefix.name}-live-range.txt").write_text(live)
    prefix.with_name(f"{prefix.name}.txt").write_text("HloModule step")
    found = buffers.read(tmp_path)
    assert found.arguments == {0: 40}
    assert (found.temporary, found.fragmentation) == (100, 0)
    assert [[v.name for v in slot.values] for slot in found.slots] == [["d"]]
    # Without the largest value the fullest moment is another, with gaps.
    shorter = "\n".join(line for line in assignment.splitlines() if " d @" not in line)
    prefix.with_name(f"{prefix.name}-buffer-assignment.txt").write_text(shorter)
    found = buffers.read(tmp_path)
    assert [slot.nbytes for slot in found.slots] == [40, 20]
    assert found.fragmentation == 40
    # The buffer of a is handed on to b.
    assert [(slot.start, slot.end) for slot in found.slots] == [(1, 6), (2, 5)]


def test_a_folder_without_a_buffer_assignment_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"0 files .*buffer-assignment"):
        buffers.read(tmp_path)


@pytest.mark.h100
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"remat": "none"},
        {"remat": "dots", "accumulate": 2},
        {"remat": "dots", "reshard_after_forward": False},
        {"defer_scatter": True},
        {"remat": jshard.Offload("hidden")},
        {"ema_decay": 0.9, "reshard_root": True, "first_k": 4},
    ],
    ids=str,
)
def test_parts_explain_what_xla_assigns_on_a_gpu(knobs, tmp_path):
    policy = policies(precision=jshard.Precision(compute="bfloat16"), **knobs)
    mesh, state, traced = traced_step(policy, h100s(DEVICES))
    compiled = traced.lower().compile(buffers.dump_options(tmp_path))
    gpu = GPUS["h100"]
    found = memory(
        mesh, policy, state, traced, gpu=gpu, compiled=compiled, dump=tmp_path
    )
    assert abs(found.unexplained) <= 0.05 * found.total
    assert found.derived == pytest.approx(found.total, rel=0.15)
    for exact in ("parameters", "optimizer", "batch"):
        (here,) = (p for p in found.parts if p.name == exact)
        assert here.bytes == here.derived
    (saved,) = (p for p in found.parts if p.name == "saved activations")
    assert saved.bytes == pytest.approx(saved.derived, rel=0.1, abs=4 * STREAM)
    if "remat" in knobs and isinstance(knobs["remat"], jshard.Offload):
        # In bfloat16; the last layer's are read at once, and stay.
        assert found.host_bytes == (SIZES.layers - 1) * HIDDEN / 2
    else:
        assert not found.host_bytes
