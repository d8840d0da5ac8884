"""A step's memory by part, as XLA assigned it."""

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
from jshard.plan import GPUS
from jshard.plan.memory import buffer_assignment
from jshard.plan.memory.breakdown import Memory, memory
from jshard.plan.output.plan_text import memory_rows
from jshard.sharding.settings.mesh import BATCH

DEVICES, EXAMPLES = 8, 2
SIZES = Sizes(layers=16, width=256, hidden=1024, vocab=64, length=32)
ADAMW = optax.adamw(1e-3)
STREAM = EXAMPLES * SIZES.length * SIZES.width * 4  # bytes of a layer's input
HIDDEN = EXAMPLES * SIZES.length * SIZES.hidden * 4
KERNELS = 2 * SIZES.width * SIZES.hidden * 4  # bytes of a layer's matrices


def traced_step(policy: jshard.Policy, mesh: Any = None) -> tuple[Any, Any]:
    """(abstract state, traced step) of the decoder on eight devices."""
    fsdp = jshard.FSDP(mesh or jshard.make_mesh(), policy)
    state = fsdp.abstract_state(make_decoder(SIZES), ADAMW)
    shape = (DEVICES * EXAMPLES * policy.accumulate, SIZES.length)
    sharding = NamedSharding(fsdp.mesh, BATCH)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    batch = {"tokens": tokens, "targets": tokens}
    return state, fsdp.train_step(loss_fn, ADAMW).trace(state, batch)


def account(policy: jshard.Policy, mesh: Any = None, **options: Any) -> Memory:
    """The memory of a step that is compiled for eight CPU devices, or for a mesh."""
    state, traced = traced_step(policy, mesh)
    with buffer_assignment.dump_folder() as folder:
        dump = buffer_assignment.dump_options(folder)
        if mesh is None:
            # In an order that needs little memory, as on GPUs.
            dump["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
            compiled = hlo.compile(traced.lower(), **dump)
        else:
            compiled = traced.lower().compile(dump)
        return memory(policy, state, compiled, folder, devices=DEVICES, **options)


def part(found: Memory, name: str) -> int:
    return next(part.bytes for part in found.parts if part.name == name)


# On CPUs.


@pytest.fixture(scope="module")
def plain() -> Memory:
    # More of this card fit into a host than the mesh has.
    return account(policies(), gpu=dataclasses.replace(GPUS["h100"], host=16))


def test_parameters_optimizer_and_batch_are_their_shards(plain):
    fsdp = jshard.FSDP(jshard.make_mesh(), policies())
    state = fsdp.abstract_state(make_decoder(SIZES), ADAMW)
    shards = sum(
        4 * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state.params)
    )
    assert part(plain, "parameters") == shards
    # Two moments; their counters and the step's.
    assert 0 < part(plain, "optimizer") - 2 * shards <= 16
    assert part(plain, "batch") == 2 * EXAMPLES * SIZES.length * 4
    explained = sum(p.bytes for p in plain.parts)
    assert plain.total == explained + plain.unexplained
    assert abs(plain.unexplained) <= 0.03 * plain.total


def test_of_layers_there_are_saved_inputs_gradients_shards_and_few_weights(plain):
    saved = part(plain, "saved activations")
    # Besides, what the root and the head keep: a few of a layer's input.
    assert SIZES.layers * STREAM <= saved <= (SIZES.layers + 4) * STREAM
    shards = SIZES.layers * KERNELS / DEVICES
    assert shards <= part(plain, "gradients") < shards + 2 * KERNELS
    assert part(plain, "gathered weights") < 3 * KERNELS


def test_what_remat_names_is_saved_and_gradients_are_whole_until_they_are_scattered():
    found = account(policies(remat=jshard.Names("hidden"), defer_scatter=True))
    kept = SIZES.layers * (STREAM + HIDDEN)
    assert kept <= part(found, "saved activations") <= kept + 4 * STREAM
    whole = part(found, "gradients")
    assert SIZES.layers * KERNELS <= whole < (SIZES.layers + 3) * KERNELS


def test_the_table_says_whether_it_fits(plain):
    rows = list(memory_rows(plain))
    assert plain.fits
    assert plain.as_dict()["fits"]
    assert plain.devices_a_host == DEVICES
    assert dataclasses.replace(plain, usable=plain.total).fits
    assert [name for name, *_ in rows] == [
        *(p.name for p in plain.parts if p.bytes),
        "unexplained",
        "total",
    ]
    assert rows[-1][-1] == "fits in the 75.2 GiB that the GPU leaves free"
    small = dataclasses.replace(plain, usable=plain.total - 1)
    assert "does not fit in" in list(memory_rows(small))[-1][-1]


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
    program = (
        "ENTRY %main (p: f32[10]) -> f32[10] {\n  ROOT %p = f32[10] parameter(0)\n}\n"
    )
    prefix.with_name(f"{prefix.name}.txt").write_text(program)
    found = buffer_assignment.read(tmp_path)
    assert found.arguments == {0: 40}
    assert found.fragmentation == 0
    assert [[v.name for v in slot.values] for slot in found.slots] == [["d"]]
    # Without the largest value the fullest moment is another, with gaps.
    shorter = "\n".join(line for line in assignment.splitlines() if " d @" not in line)
    prefix.with_name(f"{prefix.name}-buffer-assignment.txt").write_text(shorter)
    found = buffer_assignment.read(tmp_path)
    assert [slot.nbytes for slot in found.slots] == [40, 20]
    assert found.fragmentation == 40
    # The buffer of a is handed on to b.
    assert [(slot.start, slot.end) for slot in found.slots] == [(1, 6), (2, 5)]


def test_a_folder_without_a_buffer_assignment_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"0 files .*buffer-assignment"):
        buffer_assignment.read(tmp_path)


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
def test_parts_explain_what_xla_assigns_on_a_gpu(knobs):
    policy = policies(precision=jshard.Precision(compute="bfloat16"), **knobs)
    found = account(policy, h100s(DEVICES), gpu=GPUS["h100"])
    assert abs(found.unexplained) <= 0.03 * found.total
    if isinstance(policy.remat, jshard.Offload):
        # In bfloat16; the last layer's are read at once, and stay.
        assert found.host_bytes == (SIZES.layers - 1) * HIDDEN / 2
    else:
        assert not found.host_bytes
    if policy.reshard_after_forward is False:
        assert part(found, "gathered weights") > SIZES.layers * KERNELS / 2
    if not knobs:
        saved = part(found, "saved activations")
        assert saved == pytest.approx(SIZES.layers * STREAM / 2, abs=STREAM)
