"""How a Stack's layers are divided among the stages of a pipeline."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx

from jshard.errors import UserError
from jshard.fsdp.mesh import stages_of
from jshard.fsdp.state import ModelArrays
from jshard.layout.layer_dims import layer_dims, stack_of


@dataclasses.dataclass(frozen=True)
class Stages:
    """Neighbouring layers share a stage; the first stages have one more than the last.

    All devices run one program, so that each stage has as many rows as the longest one.
    The others repeat their last layer, whose result is not used.

    Attributes:
      path: of the Stack.
      layers: L.
      number: of stages.
    """

    path: tuple[str, ...]
    layers: int
    number: int

    @property
    def name(self) -> str:
        """The Stack, in words."""
        return ".".join(self.path)

    @property
    def longest(self) -> int:
        """The most layers of a stage."""
        return -(-self.layers // self.number)

    def counts(self) -> list[int]:
        """Returns the number of layers of each stage."""
        fewest, more = divmod(self.layers, self.number)
        return [fewest + (stage < more) for stage in range(self.number)]

    def rows(self) -> np.ndarray:
        """Returns the layer in each row of each stage, (stages, longest)."""
        counts = np.array(self.counts())
        starts = np.cumsum(counts) - counts
        here = np.minimum(np.arange(self.longest), counts[:, None] - 1)
        return starts[:, None] + here

    def used(self) -> np.ndarray:
        """Returns whether each row of each stage is a layer that it runs."""
        return np.arange(self.longest) < np.array(self.counts())[:, None]

    def row_of_layer(self) -> np.ndarray:
        """Returns the row of each layer, of those of all stages, (L,)."""
        return np.flatnonzero(self.used())

    def has(self, path: tuple[Any, ...]) -> bool:
        """Returns whether a variable belongs to the Stack."""
        return tuple(map(str, path))[: len(self.path)] == self.path


def divide(arrays: ModelArrays, mesh: Any) -> Stages:
    """Returns the stages of a state's Stack.

    Raises:
      UserError: there is no Stack, or more than one, or it has fewer layers than there
        are stages.
    """
    number, found = stages_of(mesh), {}
    for part in arrays[:2]:
        for path, variable in nnx.to_flat_state(part):
            if stack := stack_of(path, variable):
                nested = layer_dims(variable) > 1
                found[stack] = variable.get_value().shape[0], nested
    if len(found) != 1 or any(nested for _, nested in found.values()):
        names = ", ".join(sorted(".".join(path) for path in found)) or "none"
        raise UserError(
            f"mesh: pipe={number} divides the layers of one jshard.Stack, and the "
            f"model has {names}; make its equal layers one Stack, or leave pipe out"
        )
    ((path, (layers, _)),) = found.items()
    if layers < number:
        raise UserError(
            f"mesh: pipe={number} stages exceed the {layers} layers of "
            f"{'.'.join(path)!r}; choose at most {layers}"
        )
    return Stages(path, layers, number)
