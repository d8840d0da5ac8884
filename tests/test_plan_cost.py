"""What collectives take: steps that grow with the devices, and bytes on links."""

import pytest

from jshard.plan.cost import (
    LATENCY,
    LINK,
    NETWORK_PORT,
    NETWORK_STEP,
    STEP,
    TREE,
    Transfer,
)
from jshard.plan.topology import GPUS

H100 = GPUS["h100"]
NVLINK = LINK * H100.nvlink


def seconds(kind: str, group: int, in_host: int, nbytes: int = 0) -> float:
    return Transfer(kind, (("f32", nbytes),), group, in_host).seconds(H100) - LATENCY


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
@pytest.mark.parametrize(
    ("group", "in_host", "inside", "between"),
    [(2, 2, 1, 0), (8, 8, 7, 0), (64, 8, 56, 7), (8, 1, 0, 7), (4096, 8, 3584, 511)],
)
def test_a_ring_takes_a_step_for_each_other_device_and_crosses_the_network_once_a_host(
    kind, group, in_host, inside, between
):
    expected = inside * STEP + between * NETWORK_STEP
    assert seconds(kind, group, in_host) == pytest.approx(expected)


@pytest.mark.parametrize(("hosts", "depth"), [(2, 1), (8, 3), (9, 3), (512, 9)])
def test_a_small_all_reduce_between_hosts_takes_the_depth_of_a_tree(hosts, depth):
    chain = 2 * 7 * STEP
    expected = chain + 2 * depth * NETWORK_STEP
    assert seconds("all-reduce", 8 * hosts, 8) == pytest.approx(expected)


def test_a_large_all_reduce_goes_round_the_ring_at_all_of_the_bandwidth():
    nbytes = 1 << 30
    ring, wire = 2 * 7 * NETWORK_STEP, nbytes / NETWORK_PORT
    assert wire / TREE > ring + wire
    assert seconds("all-reduce", 8, 1, nbytes) == pytest.approx(ring + wire)


def test_an_all_reduce_in_a_host_goes_round_twice():
    assert seconds("all-reduce", 8, 8) == pytest.approx(14 * STEP)


def test_a_permutation_is_one_step():
    assert seconds("collective-permute", 8, 8) == pytest.approx(STEP)
    assert seconds("collective-permute", 16, 8) == pytest.approx(NETWORK_STEP)


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
    moved = Transfer(kind, (("f32", 63 << 20),), 64, in_host)
    assert moved.network_bytes == share * (63 << 20)


def test_bytes_take_as_long_as_the_slower_of_nvlink_and_network():
    nbytes = 63 << 20
    steps = 56 * STEP + 7 * NETWORK_STEP
    ring = nbytes / min(NVLINK, 8 * NETWORK_PORT)
    assert seconds("all-gather", 64, 8, nbytes) == pytest.approx(steps + ring)
    direct = (56 << 20) / NETWORK_PORT
    assert seconds("all-to-all", 64, 8, nbytes) == pytest.approx(steps + direct)
