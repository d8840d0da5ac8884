"""Runs of twelve steps that stop at one of them and go on."""

import functools
from pathlib import Path
from typing import Any

import pytest

from jshard.system.errors import Preempted
from resumable import RECIPE as WITH_ADAM
from resumable import train as train_recipe

STEPS = 12
# An optimizer with a state, whose step is soon compiled.
ADAM, MOMENTUM = (
    "optax.adamw(learning_rate(config))",
    "optax.sgd(learning_rate(config), 0.9)",
)
assert ADAM in WITH_ADAM
RECIPE = WITH_ADAM.replace(ADAM, MOMENTUM)
train = functools.partial(train_recipe, recipe=RECIPE)
# Without nnx.Dropout, whose plain random streams depend on the mesh.
NO_NOISE: dict[str, Any] = {"model__noise": 0.0}
GIVEN: dict[str, Any] = {"steps": STEPS, "eval_every": 6} | NO_NOISE


def train_to(step: int, folder: Path, **keys) -> Path:
    """Trains to ``step`` of twelve and sends SIGTERM there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jshard.training.callbacks.preemption.Preemption.requested",
            lambda self, now: now == step,
        )
        with pytest.raises(Preempted, match=f"at step {step}: saved"):
            train(folder, **(GIVEN | keys))
    return folder / "run"


def go_on(run: Path, **keys) -> Path:
    """Gives the same command again."""
    return train(run.parent, **(GIVEN | keys))
