"""The ways of a weight, a gradient and an activation: few frames, those of the docs."""

import re
import runpy
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
from jshard.sharding.collectives import gather as gathers
from jshard.sharding.collectives import reduce as reduces
from jshard.system.compat import jaxprs

ROOT = Path(jshard.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
ROOMS = runpy.run_path(str(PAGE.with_name("rooms.py")))


class Model(nnx.Module):
    def __init__(self, rngs):
        layer = lambda rngs: nnx.Linear(128, 128, use_bias=False, rngs=rngs)
        self.layers = jshard.Stack(layer, 2, rngs=rngs)

    def __call__(self, x):
        return self.layers(x)


def loss_fn(model, x):
    return jshard.Mean(jnp.sum(model(x)), len(x))


def frames(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[list[str]]:
    """Frames of jshard, "file: function", at each call of ``module.name`` in a step."""
    walks: list[list[str]] = []
    called = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        stack = traceback.extract_stack()[:-1]
        files = [(Path(frame.filename), frame.name) for frame in stack]
        walks.append(
            [f"{p.relative_to(ROOT)}: {name}" for p, name in files if ROOT in p.parents]
        )
        return called(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    mesh = AbstractMesh((1, 8), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    fsdp = jshard.FSDP(mesh, jshard.Policy(prefetch=True, remat="dots"))
    state = fsdp.abstract_state(Model, optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    jax.eval_shape(fsdp.train_step(loss_fn, optax.sgd(0.1)), state, batch)
    starts = [walk.index(START) for walk in walks if START in walk]
    return [walk[start:] for walk, start in zip(walks, starts, strict=False)]


START = "sharding/step/step.py: train"


WALKS = {
    "From the step to a gather": (gathers.lax, "all_gather", "prefetch.py: forward"),
    "A gradient's way": (reduces.lax, "psum_scatter", "unit.py: scatter"),
    "An activation's way": (jaxprs, "run_used", "prefetch.py: step"),
}


def walk(monkeypatch: pytest.MonkeyPatch, heading: str) -> list[str]:
    """The first walk of its kind through a frame that ends with the last name."""
    module, name, through = WALKS[heading]
    walks = frames(monkeypatch, module, name)
    found = next(w for w in walks if any(frame.endswith(through) for frame in w))
    return [frame for frame in found if "<" not in frame]  # lambdas, comprehensions


def test_a_gather_is_six_frames_and_four_files_from_the_step(monkeypatch):
    found = walk(monkeypatch, "From the step to a gather")
    assert found[0] == START
    assert found[-1] == "sharding/collectives/gather.py: all_gather"
    assert len(found) <= 6
    assert len({frame.split(":")[0] for frame in found}) <= 4


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_from_the_step_goes_down(monkeypatch, heading):
    order = [*ROOMS["order"]()]
    files = [frame.split(":")[0] for frame in walk(monkeypatch, heading)]
    levels = [order.index(ROOMS["room"](Path("jshard") / file)) for file in files]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize("heading", WALKS)
def test_the_docs_have_the_walk_that_is_traced(monkeypatch, heading):
    text = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^### {heading}$(.*?)^##", text, re.M | re.S)
    steps = re.findall(r"^\d+\. `jshard/(\S+)`, `(\w+)`", section, re.M)
    assert [f"{file}: {name}" for file, name in steps] == walk(monkeypatch, heading)
