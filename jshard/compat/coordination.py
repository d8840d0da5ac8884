"""JAX's coordination service, of which JAX exposes neither client nor address."""

import socket
from typing import Any

from jax._src import distributed


class KeyValueStore:
    """A part of the key-value store that a job's processes share, with a name.

    The service runs in process 0 and uses connections of its own, so that it answers
    while the main thread waits in a collective. All methods raise
    ``jax.errors.JaxRuntimeError`` if it cannot be reached. Tested with JAX 0.10.2,
    0.11.2 and 0.12.0.1. If it breaks, jobs of several processes can neither be joined
    nor monitor their processes.

    Raises:
      RuntimeError: ``jax.distributed.initialize`` was not called.
    """

    def __init__(self, name: str) -> None:
        if distributed.global_state.client is None:
            raise RuntimeError("jax.distributed.initialize comes first")
        self._client: Any = distributed.global_state.client
        self._folder = f"jshard/{name}"

    def put(self, key: str, text: str) -> None:
        """Sets or replaces a value."""
        self._client.key_value_set(f"{self._folder}/{key}", text, allow_overwrite=True)

    def get(self, key: str, timeout: float) -> str:
        """Waits up to `timeout` seconds for a value and returns it."""
        return self._client.blocking_key_value_get(
            f"{self._folder}/{key}", round(timeout * 1000)
        )

    def clear(self) -> None:
        """Removes all values of this name."""
        self._client.key_value_delete(f"{self._folder}/")

    def all_in(self, folder: str) -> dict[str, str]:
        """Returns the values under `folder/`, by the rest of their keys."""
        found = self._client.key_value_dir_get(f"{self._folder}/{folder}/")
        return {key.rpartition("/")[2]: text for key, text in found}


def address_of_process(index: int) -> str:
    """Returns the name or address by which other processes reach this one.

    For process 0 it is what they were given, for others the address of the interface
    towards process 0. Tested as ``KeyValueStore``; if it breaks, so do local copies.
    """
    coordinator = distributed.global_state.coordinator_address
    if coordinator is None:
        raise RuntimeError("jax.distributed.initialize comes first")
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if index == 0:
        return host
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
