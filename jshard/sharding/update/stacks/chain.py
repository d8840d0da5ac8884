"""A chain whose parts can be asked one by one.

The state of ``optax.chain`` is a tuple too, but what it was given is in its closures.
"""

from typing import Any

import optax


class Chain(optax.GradientTransformationExtraArgs):
    """What ``chain`` returns.

    Attributes:
      parts: the transformations that it was given, with a tuple of states.
    """

    parts: tuple[optax.GradientTransformation, ...]


def chain(*parts: optax.GradientTransformation) -> Chain:
    """Returns ``optax.chain(*parts)``, of which ``Policy.offload`` sees the parts.

    Updates and state are those of ``optax.chain``. With states in host memory, the
    last parts that treat layers apart are streamed, a layer at a time, and those before
    them, ``optax.clip_by_global_norm`` say, are given all gradients at once:
    ``jshard.optim.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))``.

    Args:
      parts: any optax transformations, applied in this order.
    """
    made = Chain(*optax.chain(*parts))
    made.parts = parts
    return made


def parts_of(tx: Any) -> tuple[optax.GradientTransformation, ...] | None:
    """Returns what ``chain`` was given; None if ``tx`` is of another function."""
    return tx.parts if isinstance(tx, Chain) else None
