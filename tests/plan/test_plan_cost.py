"""What collectives take: steps that grow with the devices, and bytes on links."""

import json

import pytest

from jshard.plan.cost import nccl
from jshard.plan.cost.assumptions import assumed, assumptions
from jshard.plan.cost.nccl import POST, RINGS, SIMPLE, TREES
from jshard.plan.cost.timeline import replay
from jshard.plan.cost.transfers import Transfer, transfer
from jshard.plan.fit.hardware import GPUS, STATED
from jshard.plan.hlo.program_text import parse
from jshard.plan.topology import parse as parse_topology

H100 = GPUS["h100"]
NVLINK = STATED.link * H100.link
MIB = 1 << 20
_, LL128, LL = RINGS


def seconds(kind: str, group: int, in_host: int, nbytes: int = 0) -> float:
    return Transfer(kind, (("f32", nbytes),), group, in_host).seconds(H100)


def test_constants_are_those_of_nccl():
    """Of 2.30.7's src/graph/tuning.cc."""
    for protocols, latency, step, network in (
        (RINGS, (8.4, 14.0, 6.6), (3.4, 1.9, 0.6), (14.0, 4.0, 2.7)),
        (TREES, (8.4, 14.0, 6.8), (4.0, 1.25, 0.6), (14.0, 8.5, 5.0)),
    ):
        assert [p.name for p in protocols] == ["Simple", "LL128", "LL"]
        assert [p.latency * 1e6 for p in protocols] == pytest.approx(latency)
        assert [p.step * 1e6 for p in protocols] == pytest.approx(step)
        assert [p.network_step * 1e6 for p in protocols] == pytest.approx(network)
    nvlink = NVLINK / 1e9  # LL: 141 GB/s in a host of H100s
    assert [p.share for p in RINGS] == pytest.approx([1, 0.92, 141 / nvlink], rel=0.01)
    trees = [0.92, 0.92 * 120 / 128, 0.92 / 3.8]
    assert [p.share for p in TREES] == pytest.approx(trees, rel=0.01)


def test_constants_are_told():
    model = json.loads(json.dumps(assumptions()))
    for told, protocols in (("rings", RINGS), ("trees", TREES)):
        assert [nccl.Protocol(**protocol) for protocol in model[told]] == [*protocols]
    assert (
        "LL128 (14 us, 1.9 per step over NVLink, 4 over the network, 92%" in assumed()
    )


@pytest.mark.parametrize(
    ("sends", "network"),
    [
        ("collective-permute(%p), source_target_pairs={{0,1},{2,3}}", False),
        ("collective-permute(%p), source_target_pairs={{0,1},{3,4}}", True),
        ("collective-permute(%p), source_target_pairs={{3,4},{0,1}}", True),
        ("all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}", False),
        ("all-reduce(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}", True),
        ("all-reduce(%p), replica_groups={}", True),
    ],
)
def test_what_leaves_any_host_takes_the_network(sends, network):
    """Of eight devices, four of which share a host."""
    module = parse(
        "ENTRY %main (p: f32[4]) -> f32[4] {\n"
        "  %p = f32[4]{0} parameter(0)\n"
        f"  ROOT %c = f32[4]{{0}} {sends}\n"
        "}\n"
    )
    moved = transfer(module, module.entry, module.entry.root, 8, 4)
    assert moved is not None
    assert moved.network == network
    assert bool(moved.network_bytes) == network


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize(
    ("group", "in_host", "inside", "between"),
    [(2, 2, 1, 0), (8, 8, 7, 0), (64, 8, 56, 7), (4096, 8, 3584, 511)],
)
def test_a_ring_takes_a_step_for_each_other_device_and_crosses_the_network_once_a_host(
    kind, group, in_host, inside, between
):
    step = max(LL.step, POST) if between else LL.step  # nothing else is as fast
    expected = LL.latency + inside * step + between * LL.network_step
    assert seconds(kind, group, in_host) == pytest.approx(expected)


def test_steps_of_a_ring_with_one_device_a_host_are_those_of_a_tree():
    *_, tree = TREES
    expected = LL.latency + 7 * tree.network_step
    assert seconds("all-gather", 8, 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mib", "protocol"), [(0.1, LL), (30, LL128), (200, LL128), (4000, SIMPLE)]
)
def test_a_gather_takes_the_protocol_that_is_fastest_for_its_size(mib, protocol):
    nbytes = round(mib * MIB)
    wire = nbytes / min(NVLINK, 8 * STATED.network_port)
    step = max(protocol.step, POST)
    walking = protocol.latency + 56 * step + 7 * protocol.network_step
    moving = wire / protocol.share
    if protocol is LL:
        moving = max(moving, nbytes / 20.4e9)
    assert seconds("all-gather", 64, 8, nbytes) == pytest.approx(walking + moving)


@pytest.mark.parametrize(("hosts", "depth"), [(8, 3), (9, 3), (512, 9)])
def test_a_small_all_reduce_between_hosts_takes_the_depth_of_a_tree(hosts, depth):
    *_, tree = TREES
    expected = tree.latency + 2 * 7 * tree.step + 2 * depth * tree.network_step
    assert seconds("all-reduce", 8 * hosts, 8) == pytest.approx(expected)


def test_a_large_all_reduce_goes_round_the_ring_at_all_of_the_bandwidth():
    nbytes = 1 << 30
    expected = SIMPLE.latency + 14 * SIMPLE.network_step + nbytes / STATED.network_port
    assert seconds("all-reduce", 8, 1, nbytes) == pytest.approx(expected)


def test_an_all_reduce_in_a_host_goes_round_twice():
    assert seconds("all-reduce", 8, 8) == pytest.approx(LL.latency + 14 * LL.step)


def test_what_goes_straight_has_the_simple_protocol():
    permute, latency = "collective-permute", SIMPLE.latency
    assert seconds(permute, 8, 8) == pytest.approx(latency + SIMPLE.step)
    assert seconds(permute, 16, 8) == pytest.approx(latency + SIMPLE.network_step)
    steps = 56 * SIMPLE.step + 7 * SIMPLE.network_step
    assert seconds("all-to-all", 64, 8) == pytest.approx(latency + steps)


@pytest.mark.parametrize(
    ("kind", "in_host", "share"),
    [
        ("all-gather", 8, 1 / 8),  # a ring enters a host through each port in turn
        ("all-reduce", 1, 1),
        ("all-to-all", 8, 56 / 63),  # of 63 others, seven are on the same host
        ("collective-permute", 8, 1),
        ("all-gather", 64, 0),
    ],
)
def test_what_comes_through_the_port_of_a_device(kind, in_host, share):
    moved = Transfer(kind, (("f32", 63 * MIB),), 64, in_host)
    assert moved.network_bytes == share * 63 * MIB


def test_bytes_take_as_long_as_the_slower_of_nvlink_and_network():
    nbytes = 6300 * MIB
    steps = SIMPLE.latency + 56 * SIMPLE.step + 7 * SIMPLE.network_step
    ring = nbytes / min(NVLINK, 8 * STATED.network_port)
    assert seconds("all-gather", 64, 8, nbytes) == pytest.approx(steps + ring)
    direct = 5600 * MIB / STATED.network_port
    assert seconds("all-to-all", 64, 8, nbytes) == pytest.approx(steps + direct)


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        # 100 GB at 370/450 of 900 GB/s: in a rack, and in two, through 64 ports.
        ("gb200:64", "all-gather", 0.13514),
        ("gb200:128", "all-gather", 0.13514),
        # An eighth through a port of 400 Gb/s, of which 370 are reached, or of 800.
        ("b200:16", "all-gather", 0.27027),
        ("b300:16", "all-gather", 0.13514),
        # 26.3 of the 32 GB/s of PCIe, which are fewer than eight ports of 185 Gb/s.
        ("l40s:8", "all-gather", 3.8007),
        ("l40s:16", "all-gather", 3.8007),
        # All through a port of 92.5 Gb/s.
        ("a6000:16", "collective-permute", 8.6486),
        ("rtx4090:16", "collective-permute", 8.6486),
    ],
)
def test_bytes_take_as_long_as_links_and_ports_of_the_gpu(spec, kind, expected):
    gpu, number = parse_topology(spec)
    moved = Transfer(kind, (("f32", 100 * 10**9),), number, gpu.domain)
    assert moved.seconds(gpu) == pytest.approx(expected, rel=0.005)


CALL = """\
HloModule m, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %call = f32[8,8]{1,0} custom-call(%x), custom_call_target="TARGET"
}
"""


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("mosaic_gpu_v2", "unknown kernel mosaic_gpu_v2"),
        ("__gpu$xla.gpu.triton", "unknown kernel __gpu$xla.gpu.triton"),
        ("__cub$SortKeys", "memory"),
    ],
)
def test_kernels_whose_products_nothing_is_known_of_are_said_to_be_unknown(
    target, kind
):
    module = parse(CALL.replace("TARGET", target))
    timeline = replay(module, H100, 1)
    assert [event.kind for event in timeline.events] == [kind]
    unknown = kind.startswith("unknown")
    assert timeline.unknown == ({target: 1} if unknown else {})
