"""The replay of a compiled program, on one that is written by hand."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from jshard.plan import hlo
from jshard.plan.cost.nccl import RINGS, TREES
from jshard.plan.cost.phases import Phases
from jshard.plan.cost.streams import Event
from jshard.plan.cost.timeline import Timeline, replay
from jshard.plan.cost.traffic import NETWORK, count
from jshard.plan.fit.hardware import FITTED, GPUS
from jshard.plan.output.plan_json import trace
from jshard.plan.topology import parse

H100 = GPUS["h100"]
FORWARD = "jit(step)/shard_map/jvp(layers)/while/body"
BACKWARD = "jit(step)/shard_map/transpose(jvp())"
# A loop of three layers in which a gather runs beside a product; an all-reduce that
# waits; a copy from the host; and a scatter whose result is needed at once.
TEXT = """\
HloModule step, is_scheduled=true

%body (s: (s32[], bf16[1024,1024], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %s = (s32[], bf16[1024,1024]{1,0}, bf16[128,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[1024,1024]{1,0} get-tuple-element(%s), index=1
  %w = bf16[128,1024]{1,0} get-tuple-element(%s), index=2
  %gather = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%w), \
    replica_groups=[1,8]<=[8], dimensions={0}, \
    metadata={op_name="FORWARD/all_gather"}
  %product = bf16[1024,1024]{1,0} dot(%x, %x), \
    lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
    metadata={op_name="FORWARD/dot_general"}
  %gathered = bf16[1024,1024]{1,0} all-gather-done(%gather)
  %next = bf16[1024,1024]{1,0} dot(%product, %gathered), \
    lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
    metadata={op_name="FORWARD/dot_general"}
  ROOT %out = (s32[], bf16[1024,1024]{1,0}, bf16[128,1024]{1,0}) tuple(%i, %next, %w)
}

%condition (s: (s32[], bf16[1024,1024])) -> pred[] {
  %s.1 = (s32[], bf16[1024,1024]{1,0}, bf16[128,1024]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p0: (s32[], bf16[1024,1024])) -> f32[131072] {
  %p0 = (s32[], bf16[1024,1024]{1,0}, bf16[128,1024]{1,0}) parameter(0)
  %p1 = f32[1048576]{0} parameter(1)
  %p2 = f32[1024]{0:S(5)} parameter(2)
  %from = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%p2)
  %loop = (s32[], bf16[1024,1024]{1,0}, bf16[128,1024]{1,0}) while(%p0), \
    condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %here = f32[1024]{0} copy-done(%from)
  %norm = f32[1024]{0} all-reduce(%here), \
    replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, to_apply=%add, \
    metadata={op_name="jit(step)/shard_map/psum"}
  %scale = f32[1048576]{0} multiply(%p1, %p1), metadata={op_name="BACKWARD/mul"}
  %scatter = (f32[1048576]{0}, f32[131072]{0}) reduce-scatter-start(%scale), \
    replica_groups=[2,8]<=[16], dimensions={0}, to_apply=%add, \
    metadata={op_name="BACKWARD/reduce_scatter"}
  %shard = f32[131072]{0} reduce-scatter-done(%scatter)
  ROOT %update = f32[131072]{0} add(%shard, %shard), metadata={op_name="jit(step)/add"}
}
""".replace("FORWARD", FORWARD).replace("BACKWARD", BACKWARD)
MODULE = hlo.parse(TEXT)
# Bytes on the wire of eight of the device's neighbours, and of both hosts.
GATHERED = 7 * 128 * 1024 * 2
SCATTERED = 1048576 * 4 * 7 // 8
SUMMED = 2 * 1024 * 4 * 15 // 16
PRODUCT = max(
    2 * 1024**3 / (FITTED.matmul * H100.flops),
    3 * 1024**2 * 2 / (FITTED.memory * H100.bandwidth),
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return replay(MODULE, H100, 16)


def named(timeline: Timeline, name: str) -> list[Any]:
    return [event for event in timeline.events if event.name == name]


def nvlink(nbytes: int) -> float:
    return min(ring.seconds(7, 0, nbytes / (FITTED.link * H100.link)) for ring in RINGS)


def test_a_product_takes_the_longer_of_arithmetic_and_memory(timeline):
    for event in named(timeline, "product"):
        assert event.seconds == pytest.approx(PRODUCT + FITTED.launch)
        assert event.flops == 2 * 1024**3
        assert event.bytes == 3 * 1024**2 * 2


def test_an_elementwise_kernel_takes_as_long_as_its_traffic(timeline):
    (event,) = named(timeline, "scale")
    assert event.bytes == 3 * 2**22
    assert event.seconds == pytest.approx(
        FITTED.launch + 3 * 2**22 / (FITTED.memory * H100.bandwidth)
    )


def test_a_started_gather_runs_beside_the_product_and_is_waited_for_when_done(timeline):
    gathers, products = named(timeline, "gather"), named(timeline, "product")
    others = named(timeline, "next")
    assert len(gathers) == len(products) == len(others) == 3
    for gather, product, following in zip(gathers, products, others, strict=True):
        assert gather.seconds == pytest.approx(nvlink(GATHERED))
        assert gather.start == product.start
        assert following.start == pytest.approx(max(gather.end, product.end))


def test_loops_run_as_often_as_xla_found_and_events_know_their_trips(timeline):
    assert [event.loops for event in named(timeline, "gather")] == [
        (("loop", trip),) for trip in range(3)
    ]
    assert named(timeline, "update")[0].loops == ()


def test_gaps_are_what_the_compute_stream_waits_and_say_for_what(timeline):
    short = nvlink(GATHERED) - (PRODUCT + FITTED.launch)
    assert short > 0
    gaps = [(gap.waits_for.name, gap.seconds) for gap in timeline.gaps]
    assert gaps == [
        *[("gather", pytest.approx(short))] * 3,
        ("norm", pytest.approx(named(timeline, "norm")[0].seconds)),
        ("scatter", pytest.approx(nvlink(SCATTERED))),
    ]
    last = timeline.gaps[-1]
    assert (last.before.name, last.after.name) == ("scale", "update")
    assert timeline.largest_gaps(1) == [last]


def test_exposed_communication_is_the_step_less_its_floor(timeline):
    exposed = sum(gap.seconds for gap in timeline.gaps)
    kernels = 6 * (PRODUCT + FITTED.launch) + sum(
        named(timeline, name)[0].seconds for name in ("scale", "update")
    )
    assert timeline.exposed == pytest.approx(exposed)
    assert timeline.floor == pytest.approx(kernels)
    late = timeline.stragglers
    assert timeline.seconds == pytest.approx(kernels + exposed + late)
    assert timeline.waits_for_copies == 0


def test_a_collective_without_start_and_done_is_synchronous(timeline):
    assert timeline.synchronous == ("norm",)


def test_a_group_that_leaves_the_host_goes_through_the_network(timeline):
    (norm,) = named(timeline, "norm")
    wire = SUMMED / min(8 * FITTED.network_port, FITTED.link * 450e9)
    *_, tree = TREES  # small: by LL, up and down, not round the ring
    assert norm.seconds == pytest.approx(tree.seconds(14, 2, wire, SUMMED))


def test_a_copy_from_the_host_has_its_own_stream(timeline):
    (copy,) = named(timeline, "from")
    assert (copy.stream, copy.bytes, copy.start) == ("from host", 4096, 0.0)
    assert copy.seconds == pytest.approx(FITTED.launch + 4096 / FITTED.host_bus)


def test_the_compute_stream_waits_for_a_copy_that_is_late():
    late = TEXT.replace("f32[1024]", "f32[4194304]")
    timeline = replay(hlo.parse(late), H100, 16)
    (copy,) = named(timeline, "from")
    (gap,) = [gap for gap in timeline.gaps if gap.waits_for is copy]
    assert gap.end == pytest.approx(FITTED.launch + 2**24 / FITTED.host_bus)
    assert timeline.waits_for_copies == pytest.approx(gap.seconds)
    waits = timeline.exposed + timeline.stragglers
    assert timeline.floor == pytest.approx(timeline.seconds - waits)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        hlo.parse("HloModule nothing")


def test_phases_follow_from_the_jax_operations(timeline):
    phases = Phases(timeline)
    found = {event.name: phases.of(event) for event in timeline.events}
    assert found["product"] == "forward, layers"
    assert found["scale"] == "backward"  # it is in no loop
    assert found["update"] == "update"
    assert found["norm"] == "step"
    assert sum(phases.seconds().values()) == pytest.approx(timeline.busy("compute"))


def test_a_kernel_that_xla_added_is_of_the_phase_before_it(timeline):
    (scale,) = named(timeline, "scale")
    added = scale._replace(source="")
    events = tuple(added if e is scale else e for e in timeline.events)
    phases = Phases(dataclasses.replace(timeline, events=events))
    assert phases.of(added) == "forward, layers"


def test_a_few_layers_are_the_middle_trip_of_the_loop_over_layers(timeline):
    middle = named(timeline, "product")[1], named(timeline, "next")[1]
    assert Phases(timeline).layers("forward") == (middle[0].start, middle[1].end)
    assert Phases(timeline).layers("backward") is None


def micro_batches(looped: bool) -> Timeline:
    """A kernel a second, of two micro-batches with three layers each."""
    events = []

    def add(source: str, loops: Any = (), stream: str = "compute") -> None:
        start = 1.0 * sum(event.stream == "compute" for event in events)
        kind = "memory" if stream == "compute" else "all-gather"
        name = f"{stream}.{len(events)}"
        events.append(
            Event(name, stream, kind, start, start + 1.0, source, 0, 0, loops)
        )

    for batch in (("batches", 0), ("batches", 1)):
        for way in ("shard_map/jvp({})/x", "shard_map/transpose(jvp({}))/x"):
            before, after = (
                ("embed", "head") if "transpose" not in way else ("head", "embed")
            )
            add(way.format(before), (batch,))
            for layer in range(3):
                loop = ((f"layers {way}", layer),) if looped else ()
                add(way.format("layers"), (batch, *loop), "collectives")
                add(way.format("layers"), (batch, *loop))
            add(way.format(after), (batch,))
            add(way.format(after), (batch,))
            add(way.format("layers"), (batch,))  # XLA moved it
    add("jit(step)/update/x")
    return Timeline(tuple(events), (), 21, ())


@pytest.mark.parametrize("looped", [True, False])
def test_with_micro_batches_the_head_and_the_embedding_are_not_in_the_layers(looped):
    phases = Phases(micro_batches(looped))
    assert phases.seconds() == pytest.approx(
        {
            "forward, before the layers": 2.0,
            "forward, layers": 8.0,
            "forward, after the layers": 4.0,
            "backward, before the layers": 2.0,
            "backward, layers": 8.0,
            "backward, after the layers": 4.0,
            "update": 1.0,
        }
    )
    # The second layer, or the first of two gathers: of the first micro-batch.
    first = 2 if looped else 1
    assert phases.layers("forward") == pytest.approx((first, (first + 1)))
    first += 7
    assert phases.layers("backward") == pytest.approx((first, (first + 1)))


def test_traffic_is_counted_by_kind_dtype_and_link_with_loops_unrolled():
    rows = {row.kind: row for row in count(MODULE, 16, H100)}
    gather, scatter, norm = (
        rows[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )
    assert (gather.count, gather.bytes, gather.link) == (3, 3 * GATHERED, "NVLink")
    assert (gather.dtype, gather.group) == ("bf16", 8)
    assert gather.seconds == pytest.approx(3 * nvlink(GATHERED))
    assert (scatter.count, scatter.bytes, scatter.link) == (1, SCATTERED, "NVLink")
    assert (norm.count, norm.bytes, norm.link) == (1, SUMMED, NETWORK)
    sent = {row.kind: row.network_bytes for row in count(MODULE, 16, H100)}
    assert sent == {"all-gather": 0, "reduce-scatter": 0, "all-reduce": SUMMED // 8}
    for row in count(MODULE, 16, None):
        assert (row.seconds, row.network_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("spec", "inside", "all_of_them", "through"),
    [
        ("gb200:16", "NVLink", "NVLink", 0),  # one rack
        ("b300:16", "NVLink", NETWORK, SUMMED // 8),
        ("l40s:16", "PCIe", NETWORK, SUMMED // 8),
    ],
)
def test_links_are_those_of_the_gpu(spec, inside, all_of_them, through):
    gpu, number = parse(spec)
    rows = {row.kind: row for row in count(MODULE, number, gpu)}
    assert rows["all-gather"].link == rows["reduce-scatter"].link == inside
    norm = rows["all-reduce"]
    assert (norm.link, norm.network_bytes) == (all_of_them, through)


@pytest.mark.parametrize(
    ("spec", "bus"), [("h100:16", 55e9), ("l40s:16", 27.5e9), ("gb200:16", 385e9)]
)
def test_a_copy_from_the_host_takes_the_bus_of_the_gpu(spec, bus):
    gpu, number = parse(spec)
    (copy,) = named(replay(MODULE, gpu, number), "from")
    assert copy.seconds == pytest.approx(FITTED.launch + 4096 / bus)


def test_the_trace_has_a_thread_for_each_stream_and_microseconds(timeline):
    plan: Any = SimpleNamespace(name="hand", topology="h100:16", timeline=timeline)
    written = json.loads(json.dumps(trace(plan)))["traceEvents"]
    threads = {
        x["tid"]: x["args"]["name"] for x in written if x["name"] == "thread_name"
    }
    assert set(threads.values()) == {"compute", "collectives", "from host"}
    events = [x for x in written if x["ph"] == "X"]
    assert len(events) == len(timeline.events)
    for x, event in zip(events, timeline.events, strict=True):
        assert (x["name"], threads[x["tid"]]) == (event.name, event.stream)
        assert x["ts"] == pytest.approx(event.start * 1e6)
        assert x["dur"] == pytest.approx(event.seconds * 1e6)
        assert x["args"]["bytes"] == event.bytes
        assert x["args"]["source"] == event.source


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['replica'=2,'fsdp'=2] {'fsdp'}", ((0, 1), (2, 3))),
        ("mesh['replica'=2,'fsdp'=2] {'replica'}", ((0, 2), (1, 3))),
        ("mesh['replica'=2,'fsdp'=2] {'replica','fsdp'}", ((0, 1, 2, 3),)),
        (
            "mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}",
            ((0, 1), (2, 3)),
        ),
        (
            "mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}",
            ((0, 2), (1, 3)),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", ((0, 3), (1, 2))),
        ("mesh['a'=4,'b'=1] {'a':(1)2}", ((0, 2), (1, 3))),
        ("mesh['a'=4,'b'=1] {'a':(2)2,'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("{}", ()),
    ],
)
def test_groups_are_read_however_xla_writes_them(text, groups):
    module = hlo.parse(
        "ENTRY %main (y: f32[2]) -> f32[2] {\n"
        "  %y = f32[2] parameter(0)\n"
        f"  ROOT %x = f32[2] all-reduce(%y), replica_groups={text}, to_apply=%z\n}}\n"
    )
    assert module.entry.by_name["x"].groups == groups


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("mesh['fsdp'=8] {'tensor'}", "device groups along"),
        ("mesh['fsdp'=8] {'fsdp':(1)3}", "device groups along"),
        ("@some_mesh {'fsdp'}", "unknown form of device groups: @some_mesh"),
    ],
)
def test_groups_that_are_not_understood_are_refused(groups, said):
    text = f"replica_groups={groups}"
    module = hlo.parse(
        "ENTRY %main (y: f32[2]) -> f32[2] {\n"
        "  %y = f32[2] parameter(0)\n"
        f"  ROOT %x = f32[2] all-reduce(%y), channel_id=1, {text}, to_apply=%z\n}}\n"
    )
    with pytest.raises(ValueError, match=said):
        module.entry.by_name["x"].groups  # noqa: B018


def test_collectives_between_hosts_wait_for_the_slowest():
    constants = dataclasses.replace(FITTED, straggle=0.0)
    module = hlo.parse(TEXT.replace("[1,8]<=[8]", "[1,64]<=[64]"))
    quick, slow = (
        replay(module, dataclasses.replace(H100, constants=found), 64)
        for found in (constants, dataclasses.replace(constants, straggle=1e-3))
    )
    hosts = sorted(event.hosts for event in slow.events if event.hosts > 1)
    assert hosts == [2, 8, 8, 8]  # the sum of a norm, and the gather of each trip
    assert slow.stragglers == pytest.approx(1e-3 * (1 + 3 + 3 + 3))
    assert slow.seconds - quick.seconds == pytest.approx(slow.stragglers)
    assert slow.floor == pytest.approx(quick.floor)
    assert quick.stragglers == 0.0
