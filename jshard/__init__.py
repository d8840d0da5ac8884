"""jshard: fully sharded data-parallel training for Flax models in JAX.

    shard a model   make_mesh, Policy, Precision, Names, Offload, FSDP, TrainState
    its layers      Stack, Unit, gathered, Dropout
    its loss        Loss, Mean, Means, pmean
    train, decode   Trainer, Checkpointer, init_from, restore_orbax, generate
    errors          UserError, RunFailed, Preempted
    submodules      nn (for models), optim (optimizers), training (hooks),
                    functional (plain pytrees), linen (Flax Linen models)

Each name is imported on first use: launchers and parents of workers need no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jshard import functional as functional
    from jshard import linen as linen
    from jshard import nn as nn
    from jshard import optim as optim
    from jshard import training as training
    from jshard.inference.generation.generator import generate as generate
    from jshard.nn.dropout import Dropout as Dropout
    from jshard.recipe.source import init_from as init_from
    from jshard.recipe.source import restore_orbax as restore_orbax
    from jshard.sharding.collectives.reduce import pmean as pmean
    from jshard.sharding.settings.loss import Loss as Loss
    from jshard.sharding.settings.loss import Mean as Mean
    from jshard.sharding.settings.loss import Means as Means
    from jshard.sharding.settings.mesh import make_mesh as make_mesh
    from jshard.sharding.settings.policy import Names as Names
    from jshard.sharding.settings.policy import Offload as Offload
    from jshard.sharding.settings.policy import Policy as Policy
    from jshard.sharding.settings.precision import Precision as Precision
    from jshard.sharding.settings.state import TrainState as TrainState
    from jshard.sharding.step.fsdp import FSDP as FSDP
    from jshard.sharding.units.gathered import gathered as gathered
    from jshard.sharding.units.modules import Stack as Stack
    from jshard.sharding.units.modules import Unit as Unit
    from jshard.storage.checkpoint.checkpointer import Checkpointer as Checkpointer
    from jshard.system.compat.versions import __version__ as __version__
    from jshard.system.errors import Preempted as Preempted
    from jshard.system.errors import RunFailed as RunFailed
    from jshard.system.errors import UserError as UserError
    from jshard.training.trainer import Trainer as Trainer
else:
    _MODULES = ("functional", "linen", "nn", "optim", "training")
    _HOMES = {
        "FSDP": "sharding.step.fsdp",
        "Checkpointer": "storage.checkpoint.checkpointer",
        "Dropout": "nn.dropout",
        "Loss": "sharding.settings.loss",
        "Mean": "sharding.settings.loss",
        "Means": "sharding.settings.loss",
        "Names": "sharding.settings.policy",
        "Offload": "sharding.settings.policy",
        "Policy": "sharding.settings.policy",
        "Precision": "sharding.settings.precision",
        "Preempted": "system.errors",
        "RunFailed": "system.errors",
        "Stack": "sharding.units.modules",
        "TrainState": "sharding.settings.state",
        "Trainer": "training.trainer",
        "Unit": "sharding.units.modules",
        "UserError": "system.errors",
        "__version__": "system.compat.versions",
        "gathered": "sharding.units.gathered",
        "generate": "inference.generation.generator",
        "init_from": "recipe.source",
        "make_mesh": "sharding.settings.mesh",
        "pmean": "sharding.collectives.reduce",
        "restore_orbax": "recipe.source",
    }
    __all__ = [*_HOMES, *_MODULES]

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"jshard.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f"jshard.{_HOMES[name]}")
        return globals().setdefault(name, getattr(home, name))

    def __dir__() -> list[str]:
        return __all__
