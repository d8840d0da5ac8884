"""Texts that a job's processes share through JAX's coordination service.

The service runs in process 0 and uses connections of its own, so that it answers while
the main thread waits in a collective.
"""

from jshard.compat import coordination


class KeyValueStore:
    """A part of the coordination service's key-value store, with a name.

    `jax.distributed.initialize` comes first. All methods raise
    `jax.errors.JaxRuntimeError` if the service cannot be reached.
    """

    def __init__(self, name: str) -> None:
        self._client = coordination.client()
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
