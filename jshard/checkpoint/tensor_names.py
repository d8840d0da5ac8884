"""Names of a model's tensors in safetensors files: each layer of a Stack has its own.

There, ``params.blocks.up.kernel`` of a checkpoint, of shape (4, 128, 512), is the four
tensors ``blocks.0.up.kernel`` to ``blocks.3.up.kernel``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jshard.state import TrainState
from jshard.unit.modules import Stack

Index = tuple[int, ...]
Layers = dict[Index, str]  # {(0,): "blocks.0.up.kernel", ...}


def stack_paths(state: TrainState) -> list[str]:
    """The dotted paths of a model's Stacks, "" for a model that is one.

    Args:
      state: concrete or abstract.
    """
    model = nnx.merge(state.graphdef, state.params, state.frozen, state.model_state)
    return [
        ".".join(map(str, path))
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Stack)
    ]


def tensor_names(description: Mapping[str, Any]) -> dict[str, Layers]:
    """The names of the tensors that inference with a model needs.

    These are its parameters, trained or frozen, and the floating arrays of the rest of
    its state: batch statistics, but no random streams.

    Args:
      description: of a state (``jshard.checkpoint.metadata.describe``).

    Returns:
      For each array's name in the checkpoint, its tensors by the index of their layer;
      an array outside Stacks is one tensor with the index ().
    """
    names = {}
    for stored, array in description["arrays"].items():
        kind, _, name = stored.partition(".")
        statistic = array["dtype"].startswith(("float", "bfloat"))
        if kind in ("params", "frozen") or (
            kind == "model_state" and statistic and not array["random"]
        ):
            counts = array["shape"][: array["layer_dims"]]
            names[stored] = _layers(name, counts, description["stacks"])
    return names


def _layers(name: str, counts: list[int], stacks: Iterable[str]) -> Layers:
    """The names of the layers of one array, ``counts`` in each Stack around it."""
    prefixes = sorted((f"{path}." if path else "" for path in stacks), key=len)
    prefixes = [prefix for prefix in prefixes if name.startswith(prefix)]
    if len(prefixes) != len(counts):
        return {(): name}  # known by an alias outside its Stack: it stays stacked
    layers = {}
    for index in np.ndindex(*counts):
        full = name
        for prefix, i in zip(prefixes[::-1], index[::-1], strict=True):
            full = f"{prefix}{i}.{full[len(prefix) :]}"
        layers[index] = full
    return layers
