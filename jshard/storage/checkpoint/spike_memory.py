"""What ``jshard.optim.skip_spikes`` remembers, if a run goes on that did not have it.

It may be turned on or off between two starts of a run, and its window changed: what
both remember is read, and the rest begins anew. Of another window that is how many
steps were skipped.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jshard.sharding.settings.state import TrainState
from jshard.sharding.update.skipping.skip_spikes import SkipSpikesState

_REMEMBERED = [name for name in SkipSpikesState._fields if name != "inner"]
_WINDOW = ("losses", "grad_norms", "accepted")
_NAMES = {f"opt_state.{name}" for name in _REMEMBERED}

Arrays = Mapping[str, Mapping[str, Any]]


def as_saved(state: TrainState, arrays: Arrays) -> tuple[TrainState, Arrays, str]:
    """Finds what of an abstract state a checkpoint has.

    Args:
      state: what is to be restored.
      arrays: those of the checkpoint, as it describes them.

    Returns:
      ``state`` with an optimizer's state like the checkpoint's, in which None stands
      for what is not read; the arrays without that; and how the two differ, or "".
    """
    wanted, had = state.opt_state, arrays.keys() >= _NAMES
    if not isinstance(wanted, SkipSpikesState):
        if not had:
            return state, arrays, ""
        left = _NAMES
        nothing: Any = None
        opt_state = SkipSpikesState(wanted, *[nothing] * len(_REMEMBERED))
        said = "was saved with skip_spikes, which this run is without"
    elif not had:
        left, opt_state = set(), wanted.inner
        said = "was saved without skip_spikes, which this run has"
    else:
        now, before = wanted.losses.shape[0], arrays["opt_state.losses"]["shape"][0]
        if now == before:
            return state, arrays, ""
        left = {f"opt_state.{name}" for name in _WINDOW}
        opt_state = wanted._replace(**dict.fromkeys(_WINDOW))
        said = f"has a window of {before} steps in skip_spikes, this run one of {now}"
    rest = {name: about for name, about in arrays.items() if name not in left}
    return dataclasses.replace(state, opt_state=opt_state), rest, said


def as_wanted(restored: TrainState, abstract: TrainState) -> TrainState:
    """Returns what was restored of ``as_saved`` in the form of the abstract state."""
    wanted, found = abstract.opt_state, restored.opt_state
    if not isinstance(wanted, SkipSpikesState):
        opt_state = found.inner if isinstance(found, SkipSpikesState) else found
    elif not isinstance(found, SkipSpikesState):
        anew = {name: _zeros(getattr(wanted, name)) for name in _REMEMBERED}
        opt_state = SkipSpikesState(found, **anew)
    else:
        anew = {
            x: _zeros(getattr(wanted, x)) for x in _WINDOW if found.accepted is None
        }
        opt_state = found._replace(**anew)
    return dataclasses.replace(restored, opt_state=opt_state)


def _zeros(like: Any) -> jax.Array:
    """Returns zeros with an abstract array's shape, dtype and sharding."""
    zeros = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, zeros.__getitem__)
