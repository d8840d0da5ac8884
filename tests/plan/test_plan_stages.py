"""The replay of a pipeline's stages, on a program that is written by hand."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jshard
from jshard.plan import hlo
from jshard.plan.cost.nccl import SIMPLE
from jshard.plan.cost.streams import COLLECTIVES
from jshard.plan.cost.ticks import Pipeline, pipeline_of
from jshard.plan.cost.timeline import Timeline, replay
from jshard.plan.cost.traffic import count
from jshard.plan.fit.hardware import FITTED, GPUS
from jshard.plan.hlo.program_text import BACKWARD, FORWARD, direction
from jshard.plan.output import schedule_picture
from jshard.sharding.pipeline.schedule import bubble, one_forward_one_backward
from jshard.sharding.settings.scopes import FIRST_STAGE, LAST_STAGE, SCHEDULE

H100 = GPUS["h100"]
STAGES, MICRO, PARTS = 4, 8, 2
PLAN = one_forward_one_backward(STAGES, MICRO, PARTS)
TICKS = len(PLAN.does)
SCOPE = f"jit(step)/shard_map/while/body/{SCHEDULE.format(MICRO, 1, TICKS)}/cond"
FIRST = f"{SCOPE}/branch_1_fun/{FIRST_STAGE}/cond"
LAST = f"{SCOPE}/branch_2_fun/{LAST_STAGE}/cond"
X = "bf16[1024,1024]{1,0}"
# A kernel is a product of 1024 x 1024. A stage's forward and each part of its backward
# take one; the first stage takes one more before, and the last one after the layers.
TEXT = f"""\
HloModule step, is_scheduled=true

%none (a: {X}) -> {X} {{
  %a = {X} parameter(0)
  ROOT %a2 = {X} bitcast(%a)
}}

%alone (b: {X}) -> {X} {{
  %b = {X} parameter(0)
  ROOT %alone.product = {X} dot(%b, %b), lhs_contracting_dims={{1}}, \
    rhs_contracting_dims={{0}}
}}

%other (c: {X}) -> {X} {{
  %c = {X} parameter(0)
  ROOT %c2 = {X} bitcast(%c)
}}

%forward (d: {X}) -> {X} {{
  %d = {X} parameter(0)
  %first = {X} conditional(%d, %d, %d), true_computation=%BEFORE, \
    false_computation=%other, metadata={{op_name="{FIRST}"}}
  ROOT %forward.product = {X} dot(%first, %first), lhs_contracting_dims={{1}}, \
    rhs_contracting_dims={{0}}
}}

%backward (e: {X}) -> {X} {{
  %e = {X} parameter(0)
  %last = {X} conditional(%e, %e, %e), true_computation=%AFTER, \
    false_computation=%other, metadata={{op_name="{LAST}"}}
  %shard = bf16[128,1024]{{1,0}} slice(%last), slice={{[0:128], [0:1024]}}
  %gather = {X} all-gather(%shard), replica_groups=[4,8]<=[32], dimensions={{0}}
  ROOT %backward.product = {X} dot(%last, %last), lhs_contracting_dims={{1}}, \
    rhs_contracting_dims={{0}}
}}

%rest (f: {X}) -> {X} {{
  %f = {X} parameter(0)
  ROOT %rest.product = {X} dot(%f, %f), lhs_contracting_dims={{1}}, \
    rhs_contracting_dims={{0}}
}}

%tick (s: {X}) -> {X} {{
  %s = {X} parameter(0)
  %switch = {X} conditional(%s, %s, %s, %s, %s), \
    branch_computations={{%none, %forward, %backward, %rest}}, \
    metadata={{op_name="{SCOPE}"}}
  %send = ({X}, {X}) collective-permute-start(%switch), source_target_pairs={{PAIRS}}
  ROOT %sent = {X} collective-permute-done(%send)
}}

%condition (t: {X}) -> pred[] {{
  %t = {X} parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (p: {X}) -> f32[1024] {{
  %p = {X} parameter(0)
  %loop = {X} while(%p), condition=%condition, body=%tick, \
    backend_config={{"known_trip_count":{{"n":"{TICKS}"}}}}
  %q = f32[1024]{{0}} parameter(1)
  ROOT %norm = f32[1024]{{0}} all-reduce(%q), replica_groups=[1,32]<=[32], \
    to_apply=%tick
}}
""".replace("PAIRS", ",".join(f"{{{i},{i + 8}}}" for i in range(24)))
POLICY = jshard.Policy(accumulate=MICRO)
MESH: Any = SimpleNamespace(size=32, shape={"replica": 1, "pipe": STAGES, "fsdp": 8})
KERNEL = (
    max(
        2 * 1024**3 / (FITTED.matmul * H100.flops),
        3 * 1024**2 * 2 / (FITTED.memory * H100.bandwidth),
    )
    + FITTED.launch
)
SEND = SIMPLE.seconds(0, 1, 2 * 1024**2 / H100.network_port)


def replayed(before: str = "other", after: str = "other") -> tuple[Timeline, Pipeline]:
    text = TEXT.replace("BEFORE", before).replace("AFTER", after)
    text = re.sub(r"  %(shard|gather) = .*\n", "", text)
    module = hlo.parse(text)
    pipeline = pipeline_of(module, MESH, POLICY)
    assert pipeline is not None
    return replay(module, H100, 32, pipeline), pipeline


def test_equal_ticks_leave_stages_idle_for_the_bubble_alone():
    timeline, pipeline = replayed()
    assert pipeline.bubble == pytest.approx(bubble(STAGES, MICRO))
    idle = (STAGES - 1) * (1 + PARTS) * KERNEL
    np.testing.assert_allclose(timeline.idle, [idle] * STAGES, rtol=1e-6)
    # A tick ends when its neighbours have what it sends, which nothing hides.
    assert timeline.exposed_sends == pytest.approx(TICKS * SEND)
    # Waiting for other stages is no communication: what is left is the last sum.
    (norm,) = (event for event in timeline.events if event.name == "norm")
    others = timeline.exposed - timeline.exposed_sends
    assert others == pytest.approx(norm.seconds)
    assert timeline.waits_for_copies == 0
    whole = TICKS * (KERNEL + SEND)
    assert max(cell.end for cell in timeline.cells) == pytest.approx(whole - SEND)
    kernels = sum(e.seconds for e in timeline.events if e.stream == "compute")
    assert kernels == pytest.approx(MICRO * (1 + PARTS) * KERNEL)


def test_the_loss_of_the_last_stage_keeps_the_others_waiting():
    even, _ = replayed()
    timeline, _ = replayed(after="alone")
    assert timeline.stage == STAGES - 1
    # Each of its backwards is a kernel longer, and no other stage runs that kernel.
    longer = timeline.seconds - even.seconds
    assert longer == pytest.approx(MICRO * KERNEL)
    assert timeline.idle[-1] == pytest.approx(even.idle[-1])
    assert timeline.idle[0] == pytest.approx(even.idle[0] + MICRO * KERNEL)
    assert timeline.bubble > even.bubble


def test_the_first_stage_alone_runs_what_precedes_the_layers():
    timeline, _ = replayed(before="alone")
    assert timeline.stage == 0
    ran = [event for event in timeline.events if event.name == "alone.product"]
    assert len(ran) == MICRO


def test_a_stage_takes_each_branch_once_a_micro_batch():
    module = hlo.parse(TEXT.replace("BEFORE", "other").replace("AFTER", "other"))
    pipeline = pipeline_of(module, MESH, POLICY)
    found = {row.kind: row for row in count(module, 32, H100, pipeline, stage=1)}
    assert found["all-gather"].count == MICRO
    permute = found["collective-permute"]
    assert (permute.count, permute.group) == (TICKS, 2)
    # Stages are on different hosts, where everything comes through a device's own port.
    assert permute.network_bytes == permute.bytes == TICKS * 2 * 1024**2


def test_collectives_within_a_stage_wait_for_no_other():
    module = hlo.parse(TEXT.replace("BEFORE", "other").replace("AFTER", "other"))
    pipeline = pipeline_of(module, MESH, POLICY)
    assert pipeline is not None
    gather = module.instructions["gather"]
    assert pipeline.partners(gather.groups) is None
    send = module.instructions["send"]
    assert pipeline.partners(send.groups) == ((0, 1), (0, 1, 2), (1, 2, 3), (2, 3))
    timeline = replay(module, H100, 32, pipeline)
    late = [e.late for e in timeline.events if e.stream == COLLECTIVES]
    assert max(late) > 0
    assert all(e.late == 0 for e in timeline.events if e.name == "gather")


def test_stages_keep_activations_of_fewer_micro_batches_towards_the_end():
    assert Pipeline(PLAN, 8).alive == [4, 3, 2, 1]


def test_interleaved_stages_run_what_is_before_and_after_the_layers_once():
    pipeline = Pipeline(one_forward_one_backward(STAGES, MICRO, PARTS, 2), 8)
    module = hlo.parse(TEXT.replace("BEFORE", "alone").replace("AFTER", "alone"))
    first, last = module.instructions["first"], module.instructions["last"]
    works = pipeline.does[:, 0] == 1
    taken = [
        pipeline.branches(first, 0, tick) for tick in map(int, np.flatnonzero(works))
    ]
    # Each micro-batch passes two stages of a device; the first is one of them.
    assert [names == ["alone"] for names in taken].count(True) == MICRO
    assert len(taken) == 2 * MICRO
    assert dict(pipeline.shares(first, 0)) == {"alone": 0.5, "other": 0.5}
    assert dict(pipeline.shares(first, 1)) == {"alone": 0, "other": 1}
    assert dict(pipeline.shares(last, STAGES - 1)) == {"alone": 0.5, "other": 0.5}
    # Compiled for CPUs, a conditional numbers its branches: false, then true.
    numbered = TEXT.replace("true_computation=%BEFORE, ", "").replace(
        'false_computation=%other, metadata={op_name="' + FIRST,
        'branch_computations={%other, %alone}, metadata={op_name="' + FIRST,
    )
    (first,) = (
        x for x in hlo.parse(numbered).instructions.values() if x.name == "first"
    )
    assert "branch_computations" in first.called
    assert dict(pipeline.shares(first, 1)) == {"alone": 0, "other": 1}


def test_another_schedule_than_that_of_the_mesh_is_an_error():
    module = hlo.parse(TEXT)
    with pytest.raises(ValueError, match="not the schedule"):
        pipeline_of(module, MESH, jshard.Policy(accumulate=MICRO + 1))
    without = hlo.parse(TEXT.replace("micro-batches of", "of"))
    with pytest.raises(ValueError, match="no ticks"):
        pipeline_of(without, MESH, POLICY)


def test_branches_of_ticks_have_directions():
    assert direction(f"{SCOPE}/branch_1_fun/layers/dot_general") == FORWARD
    assert direction(f"{SCOPE}/branch_3_fun/layers/dot_general") == BACKWARD
    assert direction(f"{SCOPE}/branch_2_fun/{LAST_STAGE}/cond/jvp()/dot") == FORWARD


def test_the_picture_has_a_box_for_each_forward_and_backward():
    picture = schedule_picture.render(replayed()[0])
    for way in ("forward", "backward"):
        boxes = re.findall(rf'<g class="schedule-{way} [^>]*>(.*?)</g>', picture)
        assert len(boxes) == STAGES * MICRO
        assert {
            title for box in boxes for title in re.findall(r"micro-batch (\d+)", box)
        } == set(map(str, range(1, MICRO + 1)))
    assert "device 4" in picture
    assert "paler" not in picture
    assert "device 5" not in picture
