"""Which activations wait for the backward: the values of ``Policy.remat``."""

import dataclasses
from typing import Any

from jshard.errors import UserError

POLICIES = ("full", "attention", "dots", "none")
# The name of what a flash attention kernel reads; "attention" and "dots" keep it.
ATTENTION_OPERANDS = "attention_operands"
INPUTS = "inputs"  # what Offload calls the input of each layer


@dataclasses.dataclass(frozen=True, init=False)
class Names:
    """Remat policy: keep only activations named with ``checkpoint_name``."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        if not names or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"jshard.{type(self).__name__}{names!r}: give names of activations, "
                f"like jshard.{type(self).__name__}('attended', 'hidden')"
            )
        object.__setattr__(self, "names", names)


class Offload(Names):
    """Remat policy: keep activations named with ``checkpoint_name`` in host memory.

    They move to pinned host memory in the forward and return for the backward.
    Everything else is recomputed. The input of each layer stays on the device, unless
    "inputs" is one of the names.
    """


def check_remat(remat: Any) -> None:
    """Raises UserError unless ``remat`` is a known policy."""
    policy = callable(remat) and not isinstance(remat, type)
    if remat in POLICIES or isinstance(remat, Names) or policy:
        return
    raise UserError(
        f"policy.remat: {remat!r} is not one of {', '.join(POLICIES)}, "
        "jshard.Names(...), jshard.Offload(...) or a jax.checkpoint policy"
    )
