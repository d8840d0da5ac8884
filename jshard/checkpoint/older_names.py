"""Names of arrays in checkpoints written by earlier versions of jshard."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from jshard.checkpoint.metadata import array_name
from jshard.fsdp.state import TrainState


def stored_names(state: TrainState, stored: Container[str]) -> dict[str, str]:
    """Maps the name of each array of a state to its name in a checkpoint.

    ``per_layer`` used to have one state for all Stacks with the same number of layers,
    such as "opt_state.stacked.12"; now each Stack has its own. An array that belongs to
    no parameter (a count) was shared, so that several names may map to it.

    Args:
      state: Concrete or abstract.
      stored: The names in the checkpoint.

    Returns:
      The stored name of each array; the name itself if the checkpoint lacks the array.
    """
    return {
        name: next((n for n in (name, *_earlier(path, leaf)) if n in stored), name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for name in [array_name(path)]
    }


def renamed(stored: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the stored entries by today's names; others keep their stored name."""
    used = set(names.values())
    others = {name: entry for name, entry in stored.items() if name not in used}
    return others | {now: stored[then] for now, then in names.items() if then in stored}


def _earlier(path: tuple, leaf: Any) -> Iterator[str]:
    """Yields former names, with numbers of layers (the leaf's leading dimensions)."""
    lengths, last, older = iter(np.shape(leaf)), 0, list(path)
    for index in range(1, len(path)):
        before, key = path[index - 1 : index + 1]
        if before == GetAttrKey("stacked") and isinstance(key, DictKey):
            older[index], last = DictKey(str(next(lengths))), index
    if last:
        yield array_name(tuple(older))
        # A Stack without inner Stacks used to be the "rest" next to one that has them.
        yield array_name((*older[: last + 1], GetAttrKey("rest"), *older[last + 1 :]))
