"""`jshard.plan.compare`: where a trace goes another way than its plan."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_profiles import Kernel, write_profile
from jshard.plan import compare, hlo
from jshard.plan.cost.timeline import replay
from jshard.plan.cost.traffic import Traffic
from jshard.plan.fit.hardware import GPUS, STATED
from jshard.plan.memory.breakdown import Memory, Part
from jshard.plan.output import comparison_text, plan_page
from jshard.plan.planning import Plan
from jshard.plan.trace.profile_reader import read_profile
from jshard.system.errors import UserError

GPU = dataclasses.replace(GPUS["h100"], constants=STATED)
# Two layers in which a gather runs beside a product; then an all-reduce and an update.
MODULE = hlo.parse("""\
HloModule step, is_scheduled=true

%body (s: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %s = (s32[], bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%s), index=1
  %w = bf16[512,4096]{1,0} get-tuple-element(%s), index=2
  %gather = (bf16[512,4096]{1,0}, bf16[1024,4096]{1,0}) all-gather-start(%w), \
    replica_groups={{0,1}}, dimensions={0}, \
    metadata={op_name="jit(step)/shard_map/jvp(layers)/while/body/all_gather"}
  %product = bf16[4096,4096]{1,0} dot(%x, %x), \
    lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
    metadata={op_name="jit(step)/shard_map/jvp(layers)/while/body/dot_general"}
  %gathered = bf16[1024,4096]{1,0} all-gather-done(%gather)
  %next = bf16[4096,4096]{1,0} dot(%product, %product), \
    lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
    metadata={op_name="jit(step)/shard_map/jvp(layers)/while/body/dot_general"}
  ROOT %out = (s32[], bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) tuple(%i, %next, %w)
}

%condition (s: (s32[], bf16[4096,4096])) -> pred[] {
  %s.1 = (s32[], bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p0: (s32[], bf16[4096,4096])) -> f32[1048576] {
  %p0 = (s32[], bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) parameter(0)
  %p1 = f32[1048576]{0} parameter(1)
  %square = f32[1048576]{0} multiply(%p1, %p1), metadata={op_name="jit(step)/mul"}
  %loop = (s32[], bf16[4096,4096]{1,0}, bf16[512,4096]{1,0}) while(%p0), \
    condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %sum = f32[1048576]{0} all-reduce(%square), replica_groups={{0,1}}, to_apply=%add
  ROOT %update = f32[1048576]{0} add(%sum, %sum), metadata={op_name="jit(step)/add"}
}
""")
TIMELINE = replay(MODULE, GPU, 2)
MS = 1e-3


def planned(devices: int = 2) -> Any:
    nothing: Any = None
    return Plan(
        name="step", about="", topology="", gpu=GPU, devices=devices, device_kind="",
        text="HloModule step, is_scheduled=true", module=MODULE, memory=nothing,
        traffic=nothing, timeline=TIMELINE,
    )  # fmt: skip


def one_step(begin: float = 0.0) -> list[Kernel]:
    return [
        Kernel(e.stream, e.name, begin + e.start, begin + e.end)
        for e in TIMELINE.events
    ]


def later(ran: list[Kernel], since: float, by: float) -> list[Kernel]:
    """Moves what starts at a time or after it."""
    return [
        x._replace(start=x.start + by, end=x.end + by) if x.start >= since else x
        for x in ran
    ]


def find(ran: list[Kernel], name: str, turn: int = 0) -> Kernel:
    return [x for x in ran if x.name == name][turn]


def longer(ran: list[Kernel], x: Kernel, by: float) -> list[Kernel]:
    moved = later(ran, x.end - 1e-12, by)
    return [y._replace(end=y.end + by) if y == x else y for y in moved]


def traced(folder: Path, change: Any, host: Any = ()) -> Any:
    """A comparison with two equal steps, of which one is changed by device."""
    steps = change([one_step(), one_step()])
    after = max(x.end for ran in steps for x in ran)
    ran = {i: [*step, *one_step(after)] for i, step in enumerate(steps)}
    return compare(planned(), write_profile(folder, ran, host))


def slow_kernel(steps):
    """On device 0 alone: device 1 waits in the all-reduce."""
    whole = longer(steps[0], find(steps[0], "next", 1), 3 * MS)
    last = later(steps[1], find(steps[1], "update").start, 3 * MS)
    reduce = find(last, "sum")
    return [whole, [x._replace(end=x.end + 3 * MS) if x == reduce else x for x in last]]


def slow_collective(steps):
    return [longer(ran, find(ran, "sum"), 2 * MS) for ran in steps]


def late(steps):
    return [later(ran, find(ran, "product", 1).start, 4 * MS) for ran in steps]


def exposed(steps):
    """The kernel after a gather starts with its end, and the gather is on time."""
    found = []
    for ran in steps:
        gather, after = find(ran, "gather", 1), find(ran, "next", 1)
        by = gather.end + 2 * MS - after.start
        moved = later(ran, after.start, by)
        found.append(
            [x._replace(end=gather.end + 2 * MS) if x == gather else x for x in moved]
        )
    return found


def short_product(steps):
    """The product that hides the second gather takes 1 us."""
    found = []
    for ran in steps:
        gather, product = find(ran, "gather", 1), find(ran, "product", 1)
        after = find(ran, "next", 1)
        moved = later(ran, after.start, gather.end - after.start)
        short = product._replace(end=product.start + 1e-6)
        found.append([short if x == product else x for x in moved])
    return found


def missing(steps):
    return [[x for x in ran if x.name != "next"] for ran in steps]


def extra(steps):
    found = []
    for ran in steps:
        end = max(x.end for x in ran)
        found.append([*ran, Kernel("compute", "copy.9", end, end + 5 * MS)])
    return found


def test_a_trace_of_the_plan_has_no_deviation(tmp_path):
    found = traced(tmp_path, lambda steps: steps)
    assert found.deviations == ()
    assert found.first is None
    assert found.without_first is None
    events = max(x.end for x in TIMELINE.events)
    assert found.seconds == pytest.approx((events, events), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "cause", "seconds", "words"),
    [
        (slow_kernel, "kernel slower", 3 * MS, "In step 0 dot_general next (forward, "
         "layers, turn 2 of 2) took 3.20 ms instead of 0.196 ms on device 0."),
        (slow_collective, "collective slower", 2 * MS,
         "all-reduce sum took 2.03 ms instead of 0.027 ms on device 0 after its last "),
        (late, "started late", 4 * MS, "dot_general product (forward, layers, turn 2 "
         "of 2) started 4.00 ms late on device 0: nothing in the trace ran instead."),
        (extra, "extra", 5 * MS,
         "copy.9 ran on device 0, once more than planned, and took 5.00 ms."),
    ],
)  # fmt: skip
def test_a_known_change_is_recovered_exactly(tmp_path, change, cause, seconds, words):
    found = traced(tmp_path, change)
    assert found.first is not None
    first = found.deviations[found.first]
    assert (first.cause, first.step, first.device) == (cause, 0, 0)
    assert first.seconds == pytest.approx(seconds, rel=1e-5)
    assert words in comparison_text.first(found)
    usual = max(x.end for x in TIMELINE.events)
    assert found.without_first == pytest.approx(usual, rel=1e-3)
    assert "Without it the step takes" in "\n".join(comparison_text.lines(found))


def test_beside_a_baseline_what_is_slower_in_every_step_is_first(tmp_path):
    """A larger delay of one step is not: it is no change."""
    usual, last = one_step(), max(x.end for x in one_step())
    slow = longer(usual, find(usual, "next", 1), 3 * MS)
    ran, end = [], 0.0
    for number in range(5):
        step = longer(slow, find(slow, "product"), 20 * MS) if number == 1 else slow
        ran += [x._replace(start=x.start + end, end=x.end + end) for x in step]
        end = ran[-1].end
    before = write_profile(tmp_path / "before", dict.fromkeys((0, 1), usual))
    after = write_profile(tmp_path / "after", dict.fromkeys((0, 1), ran))
    found = compare(planned(), after, before)
    assert (found.planned, found.baseline) == (None, read_profile(before))
    assert found.sums == pytest.approx({"kernel slower": 3 * MS}, rel=1e-5)
    assert found.without_first == pytest.approx(last, rel=1e-5)
    text = "\n".join(comparison_text.lines(found))
    assert "first           In the median step dot_general next (forward, lay" in text
    assert "took 3.20 ms instead of 0.196 ms on device 0." in text
    assert f"expected        the median of each operation in {before}" in text
    assert comparison_text.as_json(found)["baseline"].startswith(str(before))


def test_the_page_has_both_timelines_in_one_picture(tmp_path):
    found = traced(tmp_path, slow_kernel)
    memory = Memory((Part("weights", 10**9, ""),), 10**9, 0, GPU.usable, (), 2)
    plan = dataclasses.replace(planned(), memory=memory, traffic=Traffic((), {}))
    page = plan_page.render(plan, found)
    script = re.search(r'id="timeline">(.*?)</script>', page, re.DOTALL)
    assert script is not None
    data = json.loads(script[1])
    rows = ["compute", "collectives", "traced compute", "traced collectives"]
    assert data["streams"] == rows
    longest: dict[str, float] = {}
    for stream, kind, _, lasts, *_ in data["events"]:
        name = f"{rows[stream]} {kind}"
        longest[name] = max(longest.get(name, 0), lasts)
    # The kernel that took 3 ms longer, in the colour of its kind.
    assert longest["traced compute 0"] - longest["compute 0"] == pytest.approx(
        3000, 0.01
    )
    assert longest["traced collectives 3"] == pytest.approx(longest["collectives 3"])
    assert data["seconds"] == pytest.approx(1e6 * max(found.seconds), rel=0.01)
    assert "Traced: step 0 on device 0, below the plan." in page
    assert "took 3.20 ms instead of 0.196 ms on device 0." in page
    assert "traced" not in plan_page.render(plan)


def test_who_waits_for_a_straggler_is_said_and_is_not_first(tmp_path):
    found = traced(tmp_path, slow_kernel)
    (wait,) = (x for x in found.deviations if x.cause == "waited for a straggler")
    assert (wait.device, wait.took.last, wait.place.name) == (1, 0, "sum")
    assert wait.seconds == pytest.approx(3 * MS, rel=1e-5)
    assert found.sums == pytest.approx(
        {"kernel slower": 0.75 * MS, "waited for a straggler": 0.75 * MS}
    )


def test_what_the_plan_hides_and_the_trace_shows_is_counted_once(tmp_path):
    found = traced(tmp_path, exposed)
    causes = {x.cause for x in found.deviations}
    assert causes == {"collective slower"}  # the wait for it is its own time


def test_a_gather_with_nothing_left_to_hide_it_is_not_overlapped(tmp_path):
    found = traced(tmp_path, short_product)
    assert found.first is not None
    first = found.deviations[found.first]
    assert {x.cause for x in found.deviations} == {"not overlapped"}
    assert (first.place, first.took.awaited) == (("next", 1), ("gather", 1))
    gather = find(one_step(), "gather", 1)
    assert first.seconds == pytest.approx(gather.end - gather.start - 1e-6, rel=1e-3)
    said = "waited 0.022 ms on device 0 for all-gather gather (forward, layers, turn 2"
    assert said in comparison_text.first(found)


def test_what_is_missing_is_counted(tmp_path):
    found = traced(tmp_path, missing)
    gone = [x for x in found.deviations if x.cause == "missing"]
    assert {(x.place.name, x.place.turn, x.device) for x in gone} == {
        ("next", turn, device) for turn in (0, 1) for device in (0, 1)
    }


def test_the_annotation_of_a_step_is_no_work_of_the_host(tmp_path):
    found = traced(tmp_path, late, [("step", 0.0, 1.0)])
    assert comparison_text.first(found).endswith("nothing in the trace ran instead.")


def test_an_idle_device_is_explained_by_its_host(tmp_path):
    begin = find(one_step(), "product", 1).start
    host = [("step", 0.0, 1.0), ("load the batch", begin, begin + 4 * MS)]
    found = traced(tmp_path, late, host)
    assert found.deviations[found.first].cause == "idle device with host work"
    assert comparison_text.first(found).endswith(
        "started 4.00 ms late on device 0: its host was in load the batch."
    )


@pytest.mark.parametrize(
    ("devices", "module", "problem"),
    [
        ({0: one_step(), 1: one_step()}, "jit_other",
         "this is a trace of jit_other, and the plan is one of step: trace the"),
        ({0: one_step()}, "step", "the trace has 1 devices, and the plan 2: plan"),
        ({0: one_step()[:4], 1: one_step()[:4]}, "step", "no step of step is whole"),
        ({}, "step", "only hosts are in this profile, no kernel of a device: trace"),
        ({0: [x._replace(name="") for x in one_step()]}, "step",
         "9 kernels have no names of instructions, as in command buffers: trace again"),
        ({i: [x._replace(name=f"a.{x.name}") for x in one_step()] for i in (0, 1)},
         "step", "this is a trace of another step: of its instructions 0%"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_compared_is_one_line(
    tmp_path, devices, module, problem
):
    write_profile(tmp_path, devices, module=module)
    with pytest.raises(UserError, match=r"^--profile=[^\n]*$") as refused:
        compare(planned(), tmp_path)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.xplane.pb", b"nothing", "is no profile of JAX"),
        ("a.xplane.pb", b"", "is no profile of JAX"),
        ("a.xplane.pb", b"\x8a" * 99, "is no profile of JAX"),
        ("a.trace.json.gz", b"\x1f\x8b\x08", "is cut off"),
        ("a.trace.json.gz", b"{}", "is no trace of JAX"),
        ("notes.txt", b"", "holds no profile of JAX: give a folder"),
        ("report.nsys-rep", b"", "reports of Nsight Systems are not read: trace with"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path, name, content, problem):
    file = tmp_path / name
    file.write_bytes(content)
    path = file if file.suffix == ".nsys-rep" else tmp_path
    with pytest.raises(UserError, match=problem):
        compare(planned(), path)


def test_some_kernels_in_command_buffers_are_noted_and_many_are_refused(tmp_path):
    def hidden(*names):
        return [x._replace(name="") if x.name in names else x for x in one_step()]

    some, many = hidden("update"), hidden("square", "sum", "update")
    write_profile(tmp_path / "some", dict.fromkeys((0, 1), one_step() + some))
    write_profile(tmp_path / "many", dict.fromkeys((0, 1), many))
    notes = compare(planned(), tmp_path / "some").steps.notes
    assert "2 kernels have no names of instructions, as in command buffers" in notes[0]
    with pytest.raises(UserError, match="kernels have no names of instructions"):
        compare(planned(), tmp_path / "many")
