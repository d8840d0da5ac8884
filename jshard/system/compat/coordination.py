"""JAX's coordination service, of which JAX exposes neither client nor address."""

import collections
import inspect
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax._src import distributed

from jshard.system.errors import UserError

_DAY = 86_400_000  # milliseconds; whoever dies is found by other means
# Numbers the waits of each group of processes, which are alike in all of them.
_waits: collections.defaultdict[tuple[int, ...], Iterator[int]] = (
    collections.defaultdict(itertools.count)
)


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


def check_mtls() -> None:
    """Raises UserError if JAX would ignore what asks it for certificates.

    JAX 0.12 and later read these variables themselves. Its coordination service then
    encrypts, and lets in only who has a certificate.
    """
    asked = ("JAX_MTLS_", "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS")
    given = sorted(name for name in os.environ if name.startswith(asked))
    known = inspect.signature(jax.distributed.initialize).parameters
    if given and "mtls_cert_file" not in known:
        raise UserError(
            f"{given[0]}: JAX {jax.__version__} has no mTLS, and would let in whoever "
            "comes; JAX 0.12 has it"
        )


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Returns the processes that have devices, in order; none if it is one alone."""
    found = sorted({device.process_index for device in devices})
    return tuple(found) if len(found) > 1 else ()


def compile_together(jitted: Any, processes: tuple[int, ...], *arguments: Any) -> None:
    """Compiles a jitted function, and waits until all of ``processes`` have.

    Where the first collective of a group of devices runs, Gloo waits 30 s for each
    process, and nothing sets that time; but a process that finds a program in its cache
    is minutes ahead of one that compiles it. Tested as ``KeyValueStore``; if it breaks,
    jobs on CPUs whose processes compile for different times fail at their first step.
    """
    client: Any = distributed.global_state.client
    if not processes or client is None:
        return
    jitted.lower(*arguments).compile()  # which the call after it finds
    name = f"jshard/compiled {hash(processes)} {next(_waits[processes])}"
    client.wait_at_barrier(name, _DAY, list(processes))


def address_of_process(index: int) -> str:
    """Returns the name or address by which other processes reach this one.

    For process 0 it is what they were given, for others the address of the interface
    towards process 0. Tested as ``KeyValueStore``; if it breaks, so do local copies.
    """
    coordinator = distributed.global_state.coordinator_address
    if coordinator is None:
        raise RuntimeError("jax.distributed.initialize comes first")
    if coordinator.startswith("unix:"):
        return "127.0.0.1"
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if index == 0:
        return host
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
