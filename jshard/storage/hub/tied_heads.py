"""Heads that a config.json ties to the embedding, and another head in the files.

transformers 5 ties the two where the files have one of them, or both with equal values;
of a head with other values it says so, and keeps it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.safetensors_file import Stored, find_tensors, join_quantised

# How the names of such tensors end, and our arrays with the same values.
_COPIES = {
    "lm_head.weight": "embed.embedding",
    "predictions.decoder.weight": "embed.embedding",
    "predictions.decoder.bias": "head.bias",
}
_COMPARED = 2**22  # elements at a time


def other_head(path: Path, tensors: Mapping[str, FileTensor]) -> str:
    """Returns the tensor of a head that is not the embedding, for a tied model.

    Args:
      path: As for ``find_tensors``.
      tensors: Where the files keep the arrays of the model, by their names.

    Returns:
      The tensor's name; "" if the files have no head that the model does not read, or
      one that is equal.

    Raises:
      UserError: A file is missing or damaged.
    """
    found = join_quantised(find_tensors(path))
    places = {ours: place.named_as_in(found) for ours, place in tensors.items()}
    read = {name for place in places.values() for name in place.names}
    for name, stored in found.items():
        for end, ours in _COPIES.items():
            if name in read or not name.endswith(end) or ours not in places:
                continue
            names = places[ours].names
            if names[0] in found and not _equal(stored, found[names[0]]):
                return name
    return ""


def _equal(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape:
        return False
    a, b = one.open(), other.open()
    rows = max(1, _COMPARED // max(1, int(np.prod(one.shape[1:]))))
    return all(
        np.array_equal(_floats(a, i, rows), _floats(b, i, rows))
        for i in range(0, one.shape[0], rows)
    )


def _floats(tensor: Any, start: int, rows: int) -> np.ndarray:
    return np.asarray(tensor[start : start + rows]).astype(np.float64)
