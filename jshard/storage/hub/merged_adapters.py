"""The adapters of a checkpoint, as what they make of the weights that they are for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jshard.nn.adapted import ALPHA, STABILIZED, A, B, scale
from jshard.sharding.layout.values.magnitudes import MAGNITUDE
from jshard.storage.checkpoint.stored_arrays import open_stored
from jshard.storage.hub.tensor_names import Index, tensor_names
from jshard.system.errors import UserError

PARTS = (f".{A}", f".{B}", f".{MAGNITUDE}")


class Adapter(NamedTuple):
    """The adapter of one layer, or of one expert of it."""

    a: str  # the name of the array with A (inputs, rank), stacked if it is in a Stack
    b: str  # that with B (rank, outputs)
    magnitude: str  # that with DoRA's magnitudes (outputs,); "" without
    layer: Index  # its index in each
    scale: float  # of their product

    def merge(
        self,
        weight: np.ndarray,
        step: Path,
        about: Mapping[str, Any],
        context: Any,
    ) -> np.ndarray:
        """Returns a weight (inputs, outputs) with its adapter, in float32.

        Raises:
          UserError: The weight has another shape.
        """

        def read(name: str) -> np.ndarray:
            store = open_stored(step, about, name, context)
            return store[self.layer].read().result().astype(np.float32)

        added = self.scale * (read(self.a) @ read(self.b))
        if added.shape != weight.shape:
            raise UserError(f"the adapter {self.a} is of a weight of another shape")
        weight = weight.astype(np.float32) + added
        if not self.magnitude:
            return weight
        norms = np.linalg.norm(weight, axis=0)
        empty = norms == 0
        return weight * np.where(empty, 1, read(self.magnitude) / (norms + empty))


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
    """Returns the adapters of a checkpoint by the paths of their layers.

    Args:
      about: The checkpoint's metadata.
      ema: Whether to take the averages of those that were trained.

    Raises:
      UserError: An adapter lacks a side or its scale, or its sides do not fit.
    """
    arrays, found = about["arrays"], {}
    names = tensor_names(about)
    for stored in names:
        layer, _, part = stored.rpartition(".")
        if part in (B, MAGNITUDE) and f"{layer}.{A}" not in names:
            raise UserError(f"the checkpoint's adapter {stored} has no {layer}.{A}")
    for stored, layers in names.items():
        if not stored.endswith(PARTS[0]):
            continue
        a = stored.replace("params.", "ema.", 1) if ema else stored
        b, magnitude = (a.removesuffix(A) + part for part in (B, MAGNITUDE))
        if problem := _problem(arrays, stored, a, b):
            raise UserError(f"the checkpoint's adapter {stored} {problem}")
        entry = arrays[stored]
        s = scale(entry[ALPHA], entry["shape"][-1], entry.get(STABILIZED))
        magnitude = magnitude if magnitude in arrays else ""
        for layer, name in layers.items():
            path = name.removesuffix(PARTS[0])
            found[path] = Adapter(a, b, magnitude, layer, s)
    return found
