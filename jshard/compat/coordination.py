"""JAX's coordination service, of which JAX exposes neither client nor address."""

import socket
from typing import Any

from jax._src import distributed


def client() -> Any:
    """Returns the client, a key-value store shared by all processes of a job.

    ``distributed/key_value.py`` calls it, also while the main thread waits in a
    collective. Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If it breaks, jobs of
    several processes can neither be joined nor monitor their processes.
    """
    return _of_job("client")


def address_of_process(index: int) -> str:
    """Returns the name or address by which other processes reach this one.

    For process 0 it is what they were given, for others the address of the interface
    towards process 0. Tested and used as ``client``; if it breaks, so do local copies.
    """
    host, _, port = _of_job("coordinator_address").rpartition(":")
    host = host.strip("[]")
    if index == 0:
        return host
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _of_job(name: str) -> Any:
    found = getattr(distributed.global_state, name)
    if found is None:
        raise RuntimeError("jax.distributed.initialize comes first")
    return found
