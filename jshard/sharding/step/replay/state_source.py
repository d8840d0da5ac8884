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
        self.on_host, self._state = on_host, state
        if on_host:
            self._places: Any = jax.tree.map(lambda x: x.sharding, state)
            there = jax.tree.map(lambda x: x.with_memory_kind(HOST), self._places)
            self._state = jax.block_until_ready(jax.device_put(state, there))
            jax.tree.map(lambda x: x.delete(), state)

    def state(self) -> TrainState:
        """Returns the state on the devices; from host memory it is another copy."""
        if not self.on_host:
            return self._state
        return jax.device_put(self._state, self._places)
