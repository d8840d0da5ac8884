"""A recipe with a map to Hugging Face's names, and folders of its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jshard.recipe.load import open_recipe
from jshard.recipe.make_config import make_config
from jshard.storage.hub.safetensors_write import (
    assign_files,
    write_index,
    write_tensors,
)
from tiny_runs import IMPORTS

# Layers of a Stack, experts, transposed matrices, and a head.
RECIPE = (
    IMPORTS
    + """\
import types

from jshard.storage.hub.file_tensor import FileTensor
from jshard.recipe.config.keys import Key

KEYS = {"layers": "num_layers", "width": "hidden_size", "experts": "num_experts",
        "eps": "norm_eps"}


def get_config():
    return ConfigDict(
        {
            "steps": 1,
            "batch_size": 8,
            "log_every": 1,
            "mesh": {"cpu_devices": 8},
            "policy": {"min_shard_elements": 0},
            "model": {
                "layers": 2, "width": Key(8, "width", at_least=1), "experts": 2,
                "eps": 1e-5, "length": 4,
            },
            "rate": 0.0,
        }
    )


class Block(nnx.Module):
    def __init__(self, width, experts, rngs):
        self.linear = nnx.Linear(width, 3 * width, rngs=rngs)
        init = nnx.initializers.normal(1.0)
        self.experts = nnx.Param(init(rngs(), (experts, 3 * width, width)))

    def __call__(self, x):
        return x + jnp.einsum("bf,efd->bd", jnp.tanh(self.linear(x)), self.experts[...])


class Model(nnx.Module):
    def __init__(self, layers, width, experts, eps, length, rngs):
        self.embed = jshard.Unit(nnx.Embed(16, width, rngs=rngs))
        self.blocks = jshard.Stack(
            lambda rngs: Block(width, experts, rngs=rngs), layers, rngs=rngs
        )
        self.norm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(width, 16, use_bias=False, rngs=rngs))

    def __call__(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def make_model(config, rngs):
    return Model(**config.model, rngs=rngs)


def make_optimizer(config):
    return optax.sgd(config.rate)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(model(batch["tokens"]) ** 2), batch["tokens"].shape[0])


def make_data(config, split):
    example = {"tokens": np.int32(3)}
    return grain.MapDataset.source([example] * 8).repeat()


def read_config(json):
    if json["architectures"] != ["TinyForCausalLM"]:
        name = json["architectures"][0]
        raise jshard.UserError(f"{name} is not supported; TinyForCausalLM is")
    return {key: json[theirs] for key, theirs in KEYS.items()}


def write_config(model):
    content = {theirs: model[key] for key, theirs in KEYS.items()}
    return {"architectures": ["TinyForCausalLM"], "model_type": "tiny", **content}


def tensors(model):
    found = {
        "embed.embedding": FileTensor(("embed.weight",)),
        "norm.scale": FileTensor(("norm.weight",)),
        "head.kernel": FileTensor(("lm_head.weight",), transposed=True),
    }
    for i in range(model["layers"]):
        block = f"layers.{i}"
        names = tuple(f"{block}.experts.{e}.weight" for e in range(model["experts"]))
        found |= {
            f"blocks.{i}.linear.kernel": FileTensor((f"{block}.up.weight",), True),
            f"blocks.{i}.linear.bias": FileTensor((f"{block}.up.bias",)),
            f"blocks.{i}.experts": FileTensor(names, True),
        }
    return found


huggingface = types.SimpleNamespace(
    read_config=read_config, write_config=write_config, tensors=tensors
)
"""
)


def shapes(layers: int = 2, width: int = 8, experts: int = 2) -> dict[str, tuple]:
    """The tensors of such a model in the files, PyTorch's way round."""
    found: dict[str, tuple] = {"embed.weight": (16, width), "norm.weight": (width,)}
    for i in range(layers):
        found |= {
            f"layers.{i}.up.weight": (3 * width, width),
            f"layers.{i}.up.bias": (3 * width,),
        }
        for e in range(experts):
            found[f"layers.{i}.experts.{e}.weight"] = (width, 3 * width)
    return found | {"lm_head.weight": (16, width)}


def write_folder(
    folder: Path,
    dtype: str = "float32",
    shard_bytes: int = 2000,
    sizes: Mapping[str, int] | None = None,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Writes a folder of random tensors; returns them."""
    sizes = {"layers": 2, "width": 8, "experts": 2, **(sizes or {})}
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(jnp.dtype(dtype))
        for name, shape in shapes(**sizes).items()
    }
    write_tensor_files(folder, tensors, shard_bytes)
    content = {
        "architectures": ["TinyForCausalLM"],
        "model_type": "tiny",
        "num_layers": sizes["layers"],
        "hidden_size": sizes["width"],
        "num_experts": sizes["experts"],
        "norm_eps": 1e-6,
        "eos_token_id": 7,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    return tensors


def write_tensor_files(
    folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int
) -> None:
    sizes = {name: array.nbytes for name, array in tensors.items()}
    files = assign_files(sizes, shard_bytes)
    for file, names in files.items():
        write_tensors(folder / file, {name: tensors[name] for name in names}, "pt")
    if len(files) > 1:
        write_index(folder, files, sizes)


def abstract_state(recipe_file: Path, **overrides: Any) -> tuple[Any, Any, Any]:
    """(config, fsdp, abstract state) of the recipe, in this process."""
    from jshard.recipe.build import make_job, make_mesh
    from jshard.recipe.configured import configure

    with open_recipe(recipe_file) as recipe:
        config = make_config(recipe, overrides)
        configured = configure(recipe, config)
        job = make_job(configured, make_mesh(configured.settings.mesh))
        return job, config, job.abstract_state()
