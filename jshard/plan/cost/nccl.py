"""NCCL's protocols, with the constants of its own model of their speed.

Latencies, bandwidth shares and limits are those of NCCL 2.30.7, src/graph/tuning.cc
(``ncclTunerConstantsDefaults`` and ``ncclTopoTuneModel``), for more than two hosts with
Intel CPUs. LL128 is on by default where NVLink joins the GPUs of a host and they reach
their network ports over PCIe switches; from H100 on also over the CPU's chip-to-chip
link, or through another GPU.
"""

from typing import NamedTuple

# Seconds to post a network transfer, the minimum for a ring's step between hosts.
POST = 1e-6


class Protocol(NamedTuple):
    """One of NCCL's protocols, on rings or on trees."""

    name: str  # NCCL's
    latency: float  # seconds per collective, in addition to its steps
    step: float  # seconds of a step to the next device over NVLink
    network_step: float  # the same over the network
    share: float  # of the links' bandwidth
    network_most: float | None = None  # bytes/s of a ring or tree between hosts

    def seconds(
        self, steps: int, network_steps: int, wire: float, network_bytes: int = 0
    ) -> float:
        """Returns how long a collective takes.

        Args:
          steps: over NVLink.
          network_steps: over the network.
          wire: seconds that its bytes take at full bandwidth.
          network_bytes: that a device receives; 0 for a collective within a host.
        """
        limited = network_bytes / self.network_most if self.network_most else 0.0
        moving = max(wire / self.share, limited)
        walking = steps * self.step + network_steps * self.network_step
        return self.latency + walking + moving


SIMPLE = Protocol("Simple", 8.4e-6, 3.4e-6, 14e-6, 1.0)
RINGS = (
    SIMPLE,
    Protocol("LL128", 14e-6, 1.9e-6, 4e-6, 0.92),
    Protocol("LL", 6.6e-6, 0.6e-6, 2.7e-6, 0.38, 20.4e9),
)
TREES = (
    Protocol("Simple", 8.4e-6, 4e-6, 14e-6, 0.92),
    Protocol("LL128", 14e-6, 1.25e-6, 8.5e-6, 0.86),
    Protocol("LL", 6.8e-6, 0.6e-6, 5e-6, 0.24, 20.4e9),
)


def rings(in_host: int, network: bool) -> tuple[Protocol, ...]:
    """Returns the protocols on rings with so many devices on each host.

    With one, nothing hides its step over the network, which takes as long as a tree's.
    """
    if not network:
        return RINGS
    return tuple(
        ring._replace(
            step=max(ring.step, POST),
            network_step=(tree if in_host == 1 else ring).network_step,
        )
        for ring, tree in zip(RINGS, TREES, strict=True)
    )
