"""How a Stack's layers are divided among the stages of a pipeline's devices."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from jshard.sharding.layout.layer_dims import layer_dims, stack_of
from jshard.sharding.settings.mesh import stages_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import ModelArrays
from jshard.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Stages:
    """Neighbouring layers share a stage; the first stages have one more than the last.

    Each of p devices has v stages, its chunks: stage k is chunk k // p of device k % p.
    All devices run one program, so that each stage has as many rows as the longest one.
    The others repeat their last layer, whose result is not used.

    Attributes:
      path: of the Stack.
      layers: L.
      devices: p.
      per_device: v.
    """

    path: tuple[str, ...]
    layers: int
    devices: int
    per_device: int = 1

    @property
    def name(self) -> str:
        """The Stack, in words."""
        return ".".join(self.path)

    @property
    def number(self) -> int:
        """Of stages."""
        return self.devices * self.per_device

    @property
    def longest(self) -> int:
        """The most layers of a stage."""
        return -(-self.layers // self.number)

    def counts(self) -> list[int]:
        """Returns the number of layers of each stage."""
        fewest, more = divmod(self.layers, self.number)
        return [fewest + (stage < more) for stage in range(self.number)]

    def rows(self) -> np.ndarray:
        """Returns the layer in each row of each device, (p, v longest)."""
        counts = np.array(self.counts())
        starts = np.cumsum(counts) - counts
        here = np.minimum(np.arange(self.longest), counts[:, None] - 1)
        return self._of_devices(starts[:, None] + here)

    def used(self) -> np.ndarray:
        """Returns whether each row of each device is a layer that it runs."""
        counts = np.array(self.counts())[:, None]
        return self._of_devices(np.arange(self.longest) < counts)

    def _of_devices(self, of_stages: np.ndarray) -> np.ndarray:
        chunks = of_stages.reshape(self.per_device, self.devices, self.longest)
        return chunks.swapaxes(0, 1).reshape(self.devices, -1)

    def has(self, path: tuple[Any, ...]) -> bool:
        """Returns whether a variable belongs to the Stack."""
        return tuple(map(str, path))[: len(self.path)] == self.path


def divide(arrays: ModelArrays, mesh: Any, policy: Policy) -> Stages:
    """Returns the stages of a state's Stack.

    Raises:
      UserError: there is no Stack, or more than one, or it has fewer layers than there
        are stages.
    """
    devices, found = stages_of(mesh), {}
    for part in arrays[:2]:
        for path, variable in nnx.to_flat_state(part):
            if stack := stack_of(path, variable):
                nested = layer_dims(variable) > 1
                found[stack] = variable.get_value().shape[0], nested
    if len(found) != 1 or any(nested for _, nested in found.values()):
        names = ", ".join(sorted(".".join(path) for path in found)) or "none"
        raise UserError(
            f"mesh: pipe={devices} divides the layers of one jshard.Stack, and the "
            f"model has {names}; make its equal layers one Stack, or leave pipe out"
        )
    ((path, (layers, _)),) = found.items()
    stages = Stages(path, layers, devices, policy.stages_per_device)
    if layers < stages.number:
        raise UserError(
            f"mesh: pipe={devices}: {stages.number} stages exceed the {layers} layers "
            f"of {stages.name!r}; choose at most {layers} (pipe times "
            "policy.stages_per_device)"
        )
    return stages
