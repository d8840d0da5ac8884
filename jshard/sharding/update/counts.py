"""What an optimizer's own state says: how many updates it made, and what it rejected.

These counts are what schedules read. They differ from a run's steps where a step makes
no update (``optax.apply_if_finite``, ``optax.MultiSteps``, a loss scale), and where the
state comes from another run.
"""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

# States of optax whose count begins again, or is of something else.
_OF_OTHERS = frozenset(
    "ApplyEvery ReduceLROnPlateauState ScaleByZoomLinesearchState".split()
)
# States of optax that may make no update, or call another update in some steps alone.
_DECIDING = frozenset(
    "ApplyIfFiniteState ConditionallyMaskState ConditionallyTransformState "
    "MultiStepsState".split()
)
# States of optax whose count is what a schedule is a function of.
_OF_SCHEDULES = frozenset(
    "InjectHyperparamsState InjectStatefulHyperparamsState ScaleByScheduleState".split()
)


def updates(opt_state: Any) -> jax.Array | None:
    """Returns how many updates an optimizer made; None if it does not count them.

    Parts of an ``optax.partition`` may have made fewer than the part that made most.
    """
    return _largest(_counts(opt_state)[0])


def of_schedules(opt_state: Any) -> jax.Array | None:
    """Returns the count that schedules get in the next update, or else ``updates``."""
    found = [x.count for x in _nodes(opt_state) if _name(x) in _OF_SCHEDULES]
    return _largest(found) if found else updates(opt_state)


def differ_from_steps(opt_state: Any) -> bool:
    """Returns whether some steps make no update, so that counts stay behind."""
    return any(_name(x) in _DECIDING for x in _nodes(opt_state))


def made(before: Any, after: Any) -> jax.Array | None:
    """Returns whether an optimizer made an update; None if it makes one in each step.

    In most steps ``optax.MultiSteps`` makes none.
    """
    if (count := updates(after)) is not None:
        return count != updates(before)
    missed = skipped(before, after)
    return None if missed is None else ~missed


def rejected(opt_state: Any) -> jax.Array | None:
    """Returns how many gradients ``optax.apply_if_finite`` found not finite, or None.

    After too many in a row it uses them all the same.
    """
    found = [x for x in _nodes(opt_state) if isinstance(x, optax.ApplyIfFiniteState)]
    return _largest([x.total_notfinite for x in found])


def skipped(before: Any, after: Any) -> jax.Array | None:
    """Returns whether an optimizer rejected the gradients of a step; None if it cannot.

    As ``optax.apply_if_finite`` and the ``should_skip_update_fn`` of MultiSteps do.
    """
    found = []
    if (count := rejected(after)) is not None:
        found.append(count != rejected(before))
    for node in _nodes(after):
        if isinstance(node, optax.MultiStepsState):
            told = node.skip_state
            if isinstance(told, Mapping) and "should_skip" in told:
                found.append(told["should_skip"])
    return functools.reduce(operator.or_, found) if found else None


def _counts(state: Any) -> tuple[list[Any], bool]:
    """Returns counts of updates, and whether they are of what decides to make one."""
    if isinstance(state, optax.MultiStepsState):
        return [state.gradient_step], True
    if isinstance(state, optax.ApplyIfFiniteState):
        return _counts(state.inner_state)[0], True
    below = [_counts(x) for x in _children(state)]
    decides = any(yes for _, yes in below)
    if decides and type(state) is tuple:  # a chain, not branches side by side
        below = [(found, yes) for found, yes in below if yes]
    own = [state.count] if not decides and _counts_updates(state) else []
    return sum((found for found, _ in below), own), decides


def _counts_updates(state: Any) -> bool:
    counts = not callable(getattr(state, "count", len))  # a field, not tuple.count
    return counts and bool(_name(state)) and _name(state) not in _OF_OTHERS


def _name(state: Any) -> str:
    """Returns the name of a state's type if it is optax's; otherwise ""."""
    of_optax = type(state).__module__.partition(".")[0] == "optax"
    return type(state).__name__ if of_optax else ""


def _children(state: Any) -> list[Any]:
    if isinstance(state, Mapping):
        return list(state.values())
    return list(state) if isinstance(state, tuple | list) else []


def _nodes(state: Any) -> list[Any]:
    return [state, *(node for x in _children(state) for node in _nodes(x))]


def _largest(counts: list[Any]) -> jax.Array | None:
    # Those of a Stack's layers (per_layer) are equal; what is masked has none.
    numbers = [jnp.max(x) for x in counts if hasattr(x, "dtype")]
    return functools.reduce(jnp.maximum, numbers) if numbers else None
