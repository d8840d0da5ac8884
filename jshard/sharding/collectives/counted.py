"""Steps of fewer examples than devices: those that only fill up count nothing.

Each device has one example, of which the first ones are real. No copy is computed with
beside a real example, and what its device returns is left out.
"""

import contextlib
import contextvars
from typing import Any

import jax
from jax import lax

from jshard.sharding.settings.mesh import example_axes
from jshard.sharding.settings.scopes import within

# How many examples count in the step that is traced; None is all.
_examples = contextvars.ContextVar[int | None]("examples", default=None)


def only_first(
    examples: int | None,
) -> contextlib.AbstractContextManager[None]:
    """Says, for what is traced inside, that only so many examples count."""
    return within(_examples, examples)


def counts_here() -> jax.Array | None:
    """Returns whether this device's example counts; None if those of all devices do."""
    examples = _examples.get()
    if examples is None:
        return None
    axes: Any = example_axes(jax.sharding.get_abstract_mesh())
    return lax.axis_index(axes) < examples
