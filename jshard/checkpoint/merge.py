"""The adapters of a checkpoint, as what they add to the weights that they are for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.checkpoint.stored_arrays import ARRAYS
from jshard.checkpoint.tensor_names import Index, tensor_names
from jshard.compat.orbax_files import open_array
from jshard.nn.lora import ALPHA

SIDES = (".lora_a", ".lora_b")


class Adapter(NamedTuple):
    """The adapter of one layer.

    Attributes:
      a: The name of the array with A (inputs, rank), stacked if it is in a Stack.
      b: That with B (rank, outputs).
      layer: Its index in both.
      scale: Of their product.
    """

    a: str
    b: str
    layer: Index
    scale: float

    def read(self, step: Path, context: Any) -> np.ndarray:
        """Returns what it adds to its kernel (inputs, outputs), in float32."""
        a, b = (
            open_array(step / ARRAYS, name, context)[self.layer].read().result()
            for name in (self.a, self.b)
        )
        return self.scale * (a.astype(np.float32) @ b.astype(np.float32))


def adapters(about: Mapping[str, Any], *, ema: bool = False) -> dict[str, Adapter]:
    """Returns the adapters of a checkpoint by the tensor names of their kernels.

    Args:
      about: The checkpoint's metadata.
      ema: Whether to take the averages of those that were trained.
    """
    found = {}
    for stored, layers in tensor_names(about).items():
        if stored.endswith(SIDES[0]):
            entry = about["arrays"][stored]
            scale = entry[ALPHA] / entry["shape"][-1]
            a = stored.replace("params.", "ema.", 1) if ema else stored
            b = a.removesuffix(SIDES[0]) + SIDES[1]
            for layer, name in layers.items():
                kernel = name.removesuffix(SIDES[0]) + ".kernel"
                found[kernel] = Adapter(a, b, layer, scale)
    return found
