"""jshard: fully sharded data-parallel training for Flax models in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

import jshard.cli.quiet  # noqa: F401  # first: commands import JAX there
from jshard import linen
from jshard.collectives.gather import gather
from jshard.collectives.reduce import pmean
from jshard.cpu.order import in_order
from jshard.errors import UserError
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.mesh import make_mesh
from jshard.fsdp.policy import Names, Offload, Policy
from jshard.fsdp.precision import Precision
from jshard.fsdp.state import TrainState
from jshard.nn.attention import dot_product_attention
from jshard.nn.cross_entropy import cross_entropy
from jshard.nn.dropout import Dropout
from jshard.nn.lora import add_lora
from jshard.nn.loss import Loss, Mean, Means
from jshard.optim.bf16_moments import bf16_moments
from jshard.optim.per_layer import per_layer
from jshard.parallel.context import positions
from jshard.parallel.splits import Split
from jshard.parallel.tensor import tensor_parallel
from jshard.unit.functional import scan_layers
from jshard.unit.gathered import gathered, gathered_before, gathered_during
from jshard.unit.modules import Stack, Unit
from jshard.version import __version__

if TYPE_CHECKING:
    from jshard.checkpoint.checkpointer import Checkpointer
    from jshard.generation.generator import generate
    from jshard.training.hooks import StopTraining, early_stopping
    from jshard.training.trainer import Trainer
else:
    # Imported on first use: Orbax and Grain are slow to import.
    _LAZY = {
        "Checkpointer": "jshard.checkpoint.checkpointer",
        "StopTraining": "jshard.training.hooks",
        "Trainer": "jshard.training.trainer",
        "early_stopping": "jshard.training.hooks",
        "generate": "jshard.generation.generator",
    }

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
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
    "Split",
    "Stack",
    "StopTraining",
    "TrainState",
    "Trainer",
    "Unit",
    "UserError",
    "__version__",
    "add_lora",
    "bf16_moments",
    "cross_entropy",
    "dot_product_attention",
    "early_stopping",
    "gather",
    "gathered",
    "gathered_before",
    "gathered_during",
    "generate",
    "in_order",
    "linen",
    "make_mesh",
    "per_layer",
    "pmean",
    "positions",
    "scan_layers",
    "tensor_parallel",
]
