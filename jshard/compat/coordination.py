"""The client of JAX's coordination service, for which JAX has no public name."""

from typing import Any

from jax._src import distributed


def client() -> Any:
    """The service's client: a key-value store that all processes of a job reach.

    For the heartbeat and the supervisor, which have to talk while the main thread waits
    in a collective. Used of it are ``key_value_set``, ``blocking_key_value_get`` and
    ``key_value_dir_get``.

    Tried on JAX 0.10.2, 0.11.2 and 0.12.0.1. When it breaks, jobs of
    several processes cannot watch their processes, or be joined.

    Raises:
      RuntimeError: ``jax.distributed.initialize`` was not called.
    """
    found = distributed.global_state.client
    if found is None:
        raise RuntimeError("jax.distributed.initialize comes first")
    return found
