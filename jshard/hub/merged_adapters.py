"""The adapters of a checkpoint, as what they add to the weights that they are for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.checkpoint.stored_arrays import open_stored
from jshard.errors import UserError
from jshard.hub.tensor_names import Index, tensor_names
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

    def read(self, step: Path, about: Mapping[str, Any], context: Any) -> np.ndarray:
        """Returns what it adds to its kernel (inputs, outputs), in float32."""
        a, b = (
            store[self.layer].read().result()
            for name in (self.a, self.b)
            for store in [open_stored(step, about, name, context)]
        )
        return self.scale * (a.astype(np.float32) @ b.astype(np.float32))


def _problem(arrays: Mapping[str, Any], stored: str, a: str, b: str) -> str:
    """Returns why an adapter cannot be used, as "has no ..."; "" if it can."""
    if arrays[stored].get(ALPHA) is None:
        return f"has no {ALPHA}"
    for name in (a, b):
        if name not in arrays:
            return f"has no {name}"
    (*layers, _, rank), (*of_b, rank_of_b, _) = (
        arrays[name]["shape"] if len(arrays[name]["shape"]) >= 2 else (0, 0)
        for name in (a, b)
    )
    fits = rank and (layers, rank) == (of_b, rank_of_b)
    return "" if fits else f"has shapes that do not fit those of {b}"


def adapters(about: Mapping[str, Any], *, ema: bool = False) -> dict[str, Adapter]:
    """Returns the adapters of a checkpoint by the tensor names of their kernels.

    Args:
      about: The checkpoint's metadata.
      ema: Whether to take the averages of those that were trained.

    Raises:
      UserError: An adapter lacks a side or its scale, or its sides do not fit.
    """
    arrays, found = about["arrays"], {}
    names = tensor_names(about)
    for stored in (name for name in names if name.endswith(SIDES[1])):
        a = stored.removesuffix(SIDES[1]) + SIDES[0]
        if a not in names:
            raise UserError(f"the checkpoint's adapter {stored} has no {a}")
    for stored, layers in names.items():
        if stored.endswith(SIDES[0]):
            a = stored.replace("params.", "ema.", 1) if ema else stored
            b = a.removesuffix(SIDES[0]) + SIDES[1]
            if problem := _problem(arrays, stored, a, b):
                raise UserError(f"the checkpoint's adapter {stored} {problem}")
            scale = arrays[stored][ALPHA] / arrays[stored]["shape"][-1]
            for layer, name in layers.items():
                kernel = name.removesuffix(SIDES[0]) + ".kernel"
                found[kernel] = Adapter(a, b, layer, scale)
    return found
