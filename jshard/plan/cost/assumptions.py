"""The constants of the timeline's model, as data and in a sentence."""

from typing import Any

from jshard.plan.cost import nccl
from jshard.plan.fit.hardware import FITTED, Constants


def assumptions(constants: Constants = FITTED) -> dict[str, Any]:
    """The model's constants by name: shares, seconds, and bytes/s."""
    return {
        "source": constants.source,
        "measured_over_predicted": [constants.low, constants.high],
        "confirmed": constants.confirmed and list(constants.confirmed),
        "matrix_products_of_peak": constants.matmul,
        "float8_products_of_peak": constants.float8,
        "mxfp8_products_of_peak": constants.mxfp8,
        "nvfp4_products_of_peak": constants.nvfp4,
        "attention_of_peak": constants.attention,
        "memory_of_bandwidth": constants.memory,
        "nvlink_of_bandwidth": constants.link,
        "network_bytes_per_second_a_gpu": constants.network_port,
        "host_bus_bytes_per_second": constants.host_bus,
        "kernel_launch_seconds": constants.launch,
        "straggle_seconds": constants.straggle,
        "network_post_seconds": nccl.POST,
        "rings": [protocol._asdict() for protocol in nccl.RINGS],
        "trees": [protocol._asdict() for protocol in nccl.TREES],
    }


def assumed(constants: Constants = FITTED) -> str:
    """The same in a sentence, without the trees."""
    rings = ", ".join(
        f"{ring.name} ({ring.latency * 1e6:.2g} us, {ring.step * 1e6:.2g} per step "
        f"over NVLink, {ring.network_step * 1e6:.2g} over the network, "
        f"{ring.share:.0%} of the bandwidth)"
        for ring in nccl.RINGS
    )
    return (
        f"matrix products at {constants.matmul:.0%} of the dense bf16 peak, in float8 "
        f"at {constants.float8:.0%} of twice that and in MXFP8 at "
        f"{constants.mxfp8:.0%}, in NVFP4 at {constants.nvfp4:.0%} of the fp4 peak, "
        "attention at "
        f"{constants.attention:.0%}, memory at {constants.memory:.0%} of its "
        f"bandwidth, NVLink at {constants.link:.0%}, "
        f"{constants.network_port / 1e9:.2f} GB/s through a port of 400 Gb/s, "
        f"{constants.host_bus / 1e9:.0f} GB/s to the host over PCIe 5.0, "
        f"{constants.launch * 1e6:.2g} us per kernel, {constants.straggle * 1e3:.2g} "
        "ms per collective for each doubling of hosts "
        f"({constants.source}), and "
        f"collectives by the fastest of NCCL's protocols: {rings}"
    )
