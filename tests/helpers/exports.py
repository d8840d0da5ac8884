"""A run to export, and the command that does."""

import functools
import sys
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file

import jshard
from checkpoints import make_state
from jshard import export
from jshard.storage.checkpoint.checkpointer import Checkpointer

WIDTH = 16


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 1, use_bias=False, rngs=rngs)
        self.inner = jshard.Stack(Inner, 2, rngs=rngs)
        self.dropout = jshard.Dropout(0.1, rngs=rngs)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.blocks = jshard.Stack(Layer, 11, rngs=rngs)
        self.table = nnx.Param(jnp.ones((WIDTH, 3), jnp.bfloat16))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.decoder = Decoder(rngs)
        self.embed = jshard.Unit(nnx.Embed(40, WIDTH, rngs=rngs))
        self.tied = self.embed
        self.alias = self.decoder.blocks.gate
        self.scale = nnx.Param(jnp.float32(3))
        self.layers = nnx.List([nnx.Linear(WIDTH, 2, use_bias=False, rngs=rngs)])


NAMES = {
    "alias.kernel",  # named outside its Stack, it stays stacked
    *(f"decoder.blocks.{i}.inner.{j}.linear.kernel" for i, j in np.ndindex(11, 2)),
    *(f"decoder.blocks.{i}.norm.mean" for i in range(11)),
    *(f"decoder.blocks.{i}.norm.var" for i in range(11)),
    *(f"decoder.blocks.{i}.up.bias" for i in range(11)),
    *(f"decoder.blocks.{i}.up.kernel" for i in range(11)),
    "decoder.table",
    "embed.embedding",
    "layers.0.kernel",
    "scale",
}


def not_embed(path, value):
    return isinstance(value, nnx.Param) and "embed" not in path


def make_fsdp(ema_decay=None, **mesh):
    policy = jshard.Policy(min_shard_elements=0, ema_decay=ema_decay)
    return jshard.FSDP(jshard.make_mesh(**mesh), policy)


@functools.cache
def init(model: Any = Model):
    fsdp = make_fsdp(ema_decay=0.9)
    return make_state(fsdp.abstract_state(model, optax.sgd(0.1), wrt=not_embed), 0)


def save(folder, state):
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(state)
    return folder


@functools.cache
def abstract(model: Any = Model, **mesh):
    return make_fsdp(**mesh).abstract_state(model, optax.sgd(0.1), wrt=not_embed)


def load_all(folder):
    """What the files hold, by the safetensors package alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def commands(monkeypatch: Any, capsys: Any) -> Any:
    """Runs the command line; gives its exit code and what it says."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def call(*words: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["export", *map(str, words)])
        code: Any = 0
        try:
            export.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
