"""jshard: fully sharded data-parallel training for Flax models in JAX."""

from typing import TYPE_CHECKING, Any

import jshard.quiet  # noqa: F401  # first: commands import JAX there
from jshard.attention import dot_product_attention
from jshard.collectives import gather, pmean
from jshard.cross_entropy import cross_entropy
from jshard.dropout import Dropout
from jshard.errors import UserError
from jshard.fsdp import FSDP
from jshard.functional import scan_layers
from jshard.gathered import gathered, gathered_before, gathered_during
from jshard.layers import Stack, Unit
from jshard.loss import Loss, Mean, Means
from jshard.mesh import make_mesh
from jshard.optim import per_layer
from jshard.order import in_order
from jshard.policy import Policy
from jshard.precision import Precision
from jshard.remat import Names, Offload
from jshard.state import TrainState
from jshard.stochastic_rounding import bf16_moments
from jshard.version import __version__

if TYPE_CHECKING:
    from jshard.checkpoint import Checkpointer
else:

    def __getattr__(name: str) -> Any:
        """Imports what needs Orbax, which takes longest of all, once it is used."""
        if name == "Checkpointer":
            from jshard.checkpoint import Checkpointer

            return Checkpointer
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "FSDP",
    "Checkpointer",
    "Dropout",
    "Loss",
    "Mean",
    "Means",
    "Names",
    "Offload",
    "Policy",
    "Precision",
    "Stack",
    "TrainState",
    "Unit",
    "UserError",
    "__version__",
    "bf16_moments",
    "cross_entropy",
    "dot_product_attention",
    "gather",
    "gathered",
    "gathered_before",
    "gathered_during",
    "in_order",
    "make_mesh",
    "per_layer",
    "pmean",
    "scan_layers",
]
