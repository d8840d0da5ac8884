"""Notes that a job's processes leave for each other, in JAX's coordination service.

It lives in process 0 and is reached over its own connections, so that notes come
through while the main thread waits in a collective.
"""

from jshard.compat import coordination

_FOLDER = "jshard"


class Board:
    """A process's access to the notes; each is a text under a name.

    All methods raise `jax.errors.JaxRuntimeError` where the service cannot be reached.
    """

    def __init__(self) -> None:
        """Connects; `jax.distributed.initialize` comes first."""
        self._client = coordination.client()

    def put(self, name: str, text: str) -> None:
        """Leaves a note, or replaces one."""
        self._client.key_value_set(f"{_FOLDER}/{name}", text, allow_overwrite=True)

    def get(self, name: str, timeout: float) -> str:
        """Waits for a note, at most so many seconds."""
        return self._client.blocking_key_value_get(
            f"{_FOLDER}/{name}", round(timeout * 1000)
        )

    def all_in(self, folder: str) -> dict[str, str]:
        """The notes whose names begin with `folder/`, by the rest of their names."""
        found = self._client.key_value_dir_get(f"{_FOLDER}/{folder}/")
        return {name.rpartition("/")[2]: text for name, text in found}
