"""What an instruction is part of, by the JAX operation that XLA keeps with it.

The operation's name has the transformations around it: ``jvp`` is the forward,
``transpose`` the backward, and what is outside of ``shard_map`` is the update.
"""

FORWARD, BACKWARD, UPDATE, STEP = "forward", "backward", "update", "step"


def direction(source: str) -> str:
    """As "forward", "backward" or "update"; "step" is around them."""
    if "transpose(" in source:
        return BACKWARD
    if "jvp(" in source:
        return FORWARD
    return STEP if "shard_map" in source or not source else UPDATE
