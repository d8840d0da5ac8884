"""From a step to the gather of a layer's weight: few frames, those of the docs."""

import re
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import jshard
from jshard.collectives import gather as gathers

ROOT = Path(jshard.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class Model(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(128, 128, use_bias=False, rngs=rngs)
        self.layers = jshard.Stack(layer, 2, rngs=rngs)

    def __call__(self, x):
        return self.layers(x)


def loss_fn(model, x):
    return jshard.Mean(jnp.sum(model(x)), len(x))


def walk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Frames of jshard, "file: function", below the first gather of a layer."""
    walks: list[list[str]] = []
    all_gather = jax.lax.all_gather

    def gather(*args: Any, **kwargs: Any) -> Any:
        frames = traceback.extract_stack()[:-1]
        names = [(Path(frame.filename), frame.name) for frame in frames]
        walks.append(
            [f"{p.relative_to(ROOT)}: {name}" for p, name in names if ROOT in p.parents]
        )
        return all_gather(*args, **kwargs)

    monkeypatch.setattr(gathers.lax, "all_gather", gather)
    mesh = AbstractMesh((1, 8), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    fsdp = jshard.FSDP(mesh)
    state = fsdp.abstract_state(Model, optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    jax.eval_shape(fsdp.train_step(loss_fn, optax.sgd(0.1)), state, batch)
    # Abstract weights are gathered first, to know their types.
    found = next(walk for walk in walks if walk[-4].endswith(": body"))
    return found[found.index("fsdp/fsdp.py: train_step") :]


def test_a_gather_is_twelve_frames_and_six_files_from_the_step(monkeypatch):
    frames = walk(monkeypatch)
    assert frames[0] == "fsdp/fsdp.py: train_step"
    assert frames[-1] == "collectives/gather.py: all_gather"
    assert len(frames) <= 12
    assert len({frame.split(":")[0] for frame in frames}) <= 6


def test_the_docs_have_the_walk_that_is_traced(monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. `jshard/(\S+)`, `(\w+)`", text, re.M)
    assert [f"{file}: {name}" for file, name in steps] == walk(monkeypatch)
