"""Greedy texts are those of transformers, from the same folder."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_transformers import MARKS, SIZES

from jobs import environment
from jshard.inference.generation import Generator, Sampling
from jshard.inference.trained.trained_model import open_model
from small_tokenizer import make_tokenizer

pytestmark = MARKS

LAYERS = SIZES | {"num_hidden_layers": 4}
GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
CASES = {
    "LlamaConfig": LAYERS,
    "Gemma2Config": LAYERS | {"head_dim": 16, "sliding_window": 7},
    "Olmo2Config": LAYERS | {"pad_token_id": 0},
    "Olmo3Config": LAYERS | {"sliding_window": 7, "pad_token_id": 0},
    "GptOssConfig": LAYERS
    | {"head_dim": 16, "num_local_experts": 4, "sliding_window": 7}
    | {"num_experts_per_tok": 2},
    "Glm4MoeConfig": LAYERS
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"num_attention_heads": 2},
    "DeepseekV3Config": LAYERS
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "v_head_dim": 12}
    | {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8}
    | {"qk_rope_head_dim": 8, "first_k_dense_replace": 2},
    "MixtralConfig": LAYERS | {"num_local_experts": 4, "sliding_window": None},
    "GPT2Config": GPT2,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [20, 30, 40]]


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts_are_those_of_transformers(request, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    if name == "Olmo3Config":  # 4's rotations of it are others, and its folders refused
        request.getfixturevalue("transformers5")
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


def test_the_command_answers_prompts_as_a_t5_of_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=400,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=0,
    )
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    make_tokenizer(tmp_path, begins=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("The capital of France", return_tensors="pt").input_ids
    assert ids[0, 0] == 1  # what the tokenizer puts around a text, too
    want = theirs.generate(
        ids, max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=None
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jshard.generate",
            f"--model={tmp_path}",
            "--prompt=The capital of France",
            "--length=12",
            "--temperature=0",
        ],
        cwd=Path(tmp_path),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == tokenizer.decode(want[0, 1:], skip_special_tokens=True) + "\n"
