"""Where the state before a step stays while the step is computed several times."""

from typing import Any

import jax

from jshard.sharding.layout.memory_kinds import HOST
from jshard.sharding.settings.state import TrainState


class Source:
    """The state before a step: on the devices, or in host memory alone.

    Attributes:
      on_host: whether the devices hold it only while it is used.

    Args:
      state: on the devices; with ``on_host`` it is deleted there.
      on_host: as the attribute.
    """

    def __init__(self, state: TrainState, *, on_host: bool):
        self.on_host = on_host
        self._places = jax.tree.map(lambda x: x.sharding, state)
        self._state = self._moved_to_host(state) if on_host else state

    def state(self) -> TrainState:
        """Returns the state on the devices; from host memory it is another copy."""
        return (
            jax.device_put(self._state, self._places) if self.on_host else self._state
        )

    def _moved_to_host(self, state: TrainState) -> TrainState:
        places: Any = jax.tree.map(
            lambda place: place.with_memory_kind(HOST), self._places
        )
        moved = jax.block_until_ready(jax.device_put(state, places))
        jax.tree.map(lambda x: x.delete(), state)
        return moved
