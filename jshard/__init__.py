"""jshard: fully sharded data-parallel training for Flax models in JAX.

These names are what a training script needs. What a model imports is in ``jshard.nn``,
optimizers are in ``jshard.optim``, and plain pytrees have ``jshard.functional``.
"""

import importlib
from typing import TYPE_CHECKING, Any

import jshard.cli.quiet  # noqa: F401  # first: commands import JAX there
from jshard import functional as functional
from jshard import nn as nn
from jshard import optim as optim
from jshard.collectives.reduce import pmean
from jshard.compat.versions import __version__
from jshard.errors import UserError
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.mesh import make_mesh
from jshard.fsdp.policy import Names, Offload, Policy
from jshard.fsdp.precision import Precision
from jshard.fsdp.state import TrainState
from jshard.nn.dropout import Dropout
from jshard.nn.loss import Loss, Mean, Means
from jshard.unit.gathered import gathered
from jshard.unit.modules import Stack, Unit

if TYPE_CHECKING:
    from jshard import linen as linen
    from jshard import training as training
    from jshard.checkpoint.checkpointer import Checkpointer
    from jshard.generation.generator import generate
    from jshard.training.trainer import Trainer
else:
    # Imported on first use: Orbax and Grain are slow to import.
    _LAZY = {
        "Checkpointer": "jshard.checkpoint.checkpointer",
        "Trainer": "jshard.training.trainer",
        "generate": "jshard.generation.generator",
    }

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        if name in ("linen", "training"):
            return importlib.import_module(f"jshard.{name}")
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
    "Trainer",
    "Unit",
    "UserError",
    "__version__",
    "gathered",
    "generate",
    "make_mesh",
    "pmean",
]
