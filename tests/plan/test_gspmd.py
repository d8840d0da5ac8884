"""benchmarks/gspmd.py: the peer of the tables trains the model that jshard trains."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama
from jshard.models.llama_config import LlamaConfig
from jshard.sharding.settings.mesh import make_mesh

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gspmd  # pyright: ignore[reportMissingImports]

SIZES: dict[str, Any] = {"vocab_size": 61, "num_layers": 3, "num_heads": 4, "width": 32}
MODELS = {
    "llama": lambda rngs: Llama(
        LlamaConfig(**SIZES, num_kv_heads=2, hidden=48), rngs=rngs
    ),
    "gpt": lambda rngs: GPT(GPTConfig(**SIZES, sequence_length=16), rngs=rngs),
}


@pytest.mark.slow  # of a benchmark
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "form",
    [gspmd.Form(remat="full"), gspmd.Form(remat="none", scan=False, iota=True)],
    ids=["scan", "no scan, iota"],
)
def test_the_peer_has_the_loss_of_the_same_model(name, form):
    model = MODELS[name](nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 17), np.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    weights = np.ones(inputs.shape, np.float32)
    batch = {"inputs": inputs, "targets": targets, "weights": weights}
    expected = model.loss(inputs, targets, weights).compute()
    mesh = make_mesh(devices=jax.devices()[:1])
    found = jax.jit(lambda batch: gspmd.loss(model, batch, mesh, form))(batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
