"""Greedy texts are those of transformers, from the same folder."""

import jax
import numpy as np
import pytest
from tiny_transformers import MARKS, SIZES

from jshard.generation import Generator, Sampling
from jshard.training.trained_model import open_model

pytestmark = MARKS

LAYERS = SIZES | {"num_hidden_layers": 4}
GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
CASES = {
    "LlamaConfig": LAYERS,
    "Gemma2Config": LAYERS | {"head_dim": 16, "sliding_window": 7},
    "MixtralConfig": LAYERS | {"num_local_experts": 4, "sliding_window": None},
    "GPT2Config": GPT2,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [20, 30, 40]]


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = getattr(transformers, name)(**CASES[name], initializer_range=0.3)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)

    def continued(prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        for _ in range(24):
            with torch.no_grad():
                last = theirs(tokens).logits[:, -1]
            tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
        return tokens[0, len(prompt) :].tolist()

    with open_model(tmp_path) as model:
        generator = Generator(model.load_whole(jax.devices()[0]))
        got = generator(PROMPTS, length=24, sampling=Sampling(0))
        sharded = Generator.sharded(*model.load(jax.devices()))
        assert sharded(PROMPTS, length=24, sampling=Sampling(0)) == got
    assert got == list(map(continued, PROMPTS))
    assert len(np.unique(got)) > 3
