"""Image classifiers read from folders of transformers or timm, and written again."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import jshard
from checkpoints import read_parameters
from foreign_weights import randomize
from jshard.export import export
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.hub.parameters import find_parameters
from parity import make_mesh

B, SIZE, CLASSES = 8, 32, 5


class Mapped(NamedTuple):
    """A model and its map."""

    map: Any
    model: Any
    config: Any

    @property
    def file(self) -> str:
        return self.map.__name__.rpartition(".")[2]


def randomize_all(torch_model: Any) -> None:
    """Weights, and the statistics of batch norms."""
    torch = pytest.importorskip("torch")
    randomize(torch_model)
    for name, value in torch_model.named_buffers():
        if "running" in name:
            value.copy_(torch.rand_like(value) + ("var" in name))


def images(channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, SIZE, SIZE, channels)).astype(np.float32)


def imported(
    folder: Path, mapped: Mapped, replica: int
) -> tuple[jshard.FSDP, Any, dict[str, Any]]:
    keys = mapped.map.read_config(json.loads((folder / "config.json").read_text()))
    fsdp = jshard.FSDP(
        make_mesh(replica, 8 // replica), jshard.Policy(min_shard_elements=0)
    )
    make_model = lambda rngs: mapped.model(mapped.config(**keys), rngs=rngs)
    state = fsdp.init(make_model, optax.sgd(0.1), seed=1)
    source = find_parameters(folder, state, tensors=mapped.map.tensors(keys))
    return fsdp, read_parameters(source, state), keys


def logits(folder: Path, mapped: Mapped, replica: int, images: np.ndarray) -> Any:
    fsdp, state, _ = imported(folder, mapped, replica)
    predict = fsdp.predict_step(lambda model, batch: model(batch["image"]))
    with jax.default_matmul_precision("highest"):
        return fsdp.fetch(predict(state, fsdp.shard_batch({"image": images})))


RECIPE = """\
from jshard.models import {file} as {attribute}


def get_config():
    from ml_collections import ConfigDict
    return ConfigDict({{"steps": 1, "batch_size": 8, "model": {{}}}})


make_model = make_optimizer = loss_fn = make_data = lambda *_: None
"""


def write_again(folder: Path, mapped: Mapped, format: str, parent: Path) -> Path:
    """Reads a folder into a state, saves it, and exports that."""
    _, state, keys = imported(folder, mapped, 2)
    with Checkpointer(parent / "run" / "checkpoints") as checkpointer:
        config = {"recipe": "tiny", "model": {**keys, "from": ""}}
        checkpointer.save(state, config=config)
    recipe = parent / "tiny.py"
    recipe.write_text(RECIPE.format(file=mapped.file, attribute=format))
    export(parent / "run", parent / "out", format=format, recipe=str(recipe))
    content = json.loads((parent / "out" / "config.json").read_text())
    assert mapped.map.read_config(content) == keys
    return parent / "out"
