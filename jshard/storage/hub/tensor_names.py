"""Names of a model's tensors in safetensors files, one for each layer of a Stack.

The array ``params.blocks.up.kernel`` of a checkpoint, of shape (4, 128, 512), becomes
the tensors ``blocks.0.up.kernel`` to ``blocks.3.up.kernel``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Index = tuple[int, ...]
Layers = dict[Index, str]  # {(0,): "blocks.0.up.kernel", ...}


def tensor_names(metadata: Mapping[str, Any]) -> dict[str, Layers]:
    """Returns the names of the tensors needed for inference with a model.

    They are its parameters, trained or frozen, and the floating-point arrays of its
    other state, such as batch statistics, without random streams.

    Args:
      metadata: Of a state (``jshard.storage.checkpoint.metadata.describe``).

    Returns:
      For each array's name in the checkpoint, the tensor names by layer index, in the
      order of the layers. An array outside Stacks has a single tensor, of index ().
    """
    names = {}
    for stored, array in metadata["arrays"].items():
        kind, _, name = stored.partition(".")
        floating = array["dtype"].startswith(("float", "bfloat"))
        if kind in ("params", "frozen") or (
            kind == "model_state" and floating and not array["random"]
        ):
            counts = array["shape"][: array["layer_dims"]]
            names[stored] = _layers(name, counts, metadata["stacks"])
    return names


def _layers(name: str, counts: list[int], stacks: Iterable[str]) -> Layers:
    """Returns the names of an array's layers; ``counts`` has one for each Stack."""
    prefixes = sorted((f"{path}." if path else "" for path in stacks), key=len)
    prefixes = [prefix for prefix in prefixes if name.startswith(prefix)]
    if len(prefixes) != len(counts):
        return {(): name}  # an alias outside its Stack: it stays stacked
    layers = {}
    for index in np.ndindex(*counts):
        full = name
        for prefix, i in zip(prefixes[::-1], index[::-1], strict=True):
            full = f"{prefix}{i}.{full[len(prefix) :]}"
        layers[index] = full
    return layers
