"""The client of JAX's coordination service, which JAX does not expose publicly."""

from typing import Any

from jax._src import distributed


def client() -> Any:
    """Returns the client, a key-value store shared by all processes of a job.

    ``distributed/key_value.py`` calls it, also while the main thread waits in a
    collective. Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If it breaks, jobs of
    several processes can neither be joined nor monitor their processes.
    """
    found = distributed.global_state.client
    if found is None:
        raise RuntimeError("jax.distributed.initialize comes first")
    return found
