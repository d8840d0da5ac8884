"""Names that arrays have in checkpoints of earlier versions."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from jshard.checkpoint.metadata import array_name
from jshard.state import TrainState


def stored_names(state: TrainState, stored: Container[str]) -> dict[str, str]:
    """The name under which a checkpoint stores each array of a state.

    ``per_layer`` used to have one state for all Stacks of a number of layers, in
    "opt_state.stacked.12" say, where each Stack has its own now. What is no parameter's
    (a count) was one array for all of them, which each takes.

    Args:
      state: concrete or abstract.
      stored: the names in the checkpoint.

    Returns:
      For the name of each array the one that is stored, or itself where none is.
    """
    return {
        name: next((n for n in (name, *_earlier(path, leaf)) if n in stored), name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for name in [array_name(path)]
    }


def renamed(stored: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What is stored, by the names that arrays have now; what is left as it was."""
    used = set(names.values())
    left = {name: entry for name, entry in stored.items() if name not in used}
    return left | {now: stored[then] for now, then in names.items() if then in stored}


def _earlier(path: tuple, leaf: Any) -> Iterator[str]:
    """The names with numbers of layers, which are a leaf's first dimensions."""
    lengths, last, older = iter(np.shape(leaf)), 0, list(path)
    for index in range(1, len(path)):
        before, key = path[index - 1 : index + 1]
        if before == GetAttrKey("stacked") and isinstance(key, DictKey):
            older[index], last = DictKey(str(next(lengths))), index
    if last:
        yield array_name(tuple(older))
        # Beside a Stack of Stacks, another as deep was the rest of its layers.
        yield array_name((*older[: last + 1], GetAttrKey("rest"), *older[last + 1 :]))
