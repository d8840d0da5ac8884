"""The maps and rotations against numbers of transformers, without it installed.

tests/huggingface/recorded.py made them, with transformers 5.23.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded
from flax import nnx
from tiny_transformers import MARKS

from filled import filled
from foreign_weights import load
from jshard.models import llama_huggingface, t5_huggingface
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.t5 import T5, T5Config

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*of the parameters are in no Stack or Unit"
)
RECORDED: dict[str, Any] = json.loads(recorded.FILE.read_text())


def the_map(name: str) -> Any:
    return t5_huggingface if name == "t5" else llama_huggingface


@pytest.mark.parametrize("name", recorded.MODELS)
def test_names_are_those_in_the_files_of_transformers(name):
    keys = the_map(name).read_config(recorded.config_of(name))
    places = the_map(name).tensors(keys)
    used = [file for place in places.values() for file in place.names]
    assert sorted(used) == sorted(RECORDED["models"][name]["shapes"])


@pytest.mark.quick("mixtral", "t5")
@pytest.mark.parametrize("name", recorded.MODELS)
def test_logits_are_the_recorded_ones(name):
    """Which of two matrices of one shape is which shows in the numbers alone."""
    known = RECORDED["models"][name]
    files = {
        file: recorded.tensor(file, tuple(shape))
        for file, shape in known["shapes"].items()
    }
    keys = the_map(name).read_config(recorded.config_of(name))
    tokens = recorded.TOKENS
    if name == "t5":
        model = filled(lambda: T5(T5Config(**keys), rngs=nnx.Rngs(0)))
        inputs = (tokens, tokens, np.ones(tokens.shape, bool))
    else:
        model = filled(lambda: Llama(LlamaConfig(**keys), rngs=nnx.Rngs(0)))
        inputs = (tokens,)
    load(model, files, the_map(name).tensors(keys))
    with jax.default_matmul_precision("highest"):
        got = nnx.jit(lambda model, *inputs: model(*inputs)[0, -1])(model, *inputs)
    want = np.array(known["logits"])
    assert np.std(want) > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.max(np.abs(want)))


@pytest.mark.parametrize("name", recorded.ROPES)
def test_rotations_are_the_recorded_ones(name):
    keys = llama_huggingface.read_config(recorded.rope_config(name))
    rope = LlamaConfig(**keys).rope
    want = RECORDED["ropes"][name]
    got = rope.frequencies(64, jnp.float32)
    np.testing.assert_allclose(got, want["frequencies"], rtol=2e-6)
    np.testing.assert_allclose(rope.amplitude(), want["amplitude"], rtol=1e-12)


class TestInstalled:
    """The numbers are still those of the transformers that is installed."""

    pytestmark = MARKS

    def test_the_recorded_numbers_are_those_of_transformers(self, transformers5):
        now = json.loads(json.dumps(recorded.record()))
        for name, known in RECORDED["models"].items():
            assert now["models"][name]["shapes"] == known["shapes"]
            np.testing.assert_allclose(
                now["models"][name]["logits"], known["logits"], rtol=1e-4, atol=1e-5
            )
        for name, known in RECORDED["ropes"].items():
            for key, value in known.items():
                np.testing.assert_allclose(now["ropes"][name][key], value, rtol=1e-6)
