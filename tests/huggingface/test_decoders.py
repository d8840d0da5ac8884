"""The decoders and their maps against transformers: tiny random models, in torch."""

import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_transformers import WARNINGS, V, logits_of, random_decoder

from filled import filled
from foreign_weights import check_logits, load, read_tensors, write_again
from jshard.models import gpt_huggingface, llama_huggingface
from jshard.models.gpt import GPT, GPTConfig
from jshard.models.llama import Llama, LlamaConfig

pytestmark = [
    WARNINGS,
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

B, T = 8, 24
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
CASES = {
    "llama2": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "llama-linear-bias": (
        "LlamaConfig",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "attention_bias": True,
            "head_dim": 12,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_scaling": YARN}),
    "qwen2-windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**GEMMA, "num_hidden_layers": 4}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 8,  # a pattern of six, and two
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0, "eos_token_id": 2}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 6,  # a pattern of four, and two
            "sliding_window": 6,
            "rope_scaling": YARN | {"attention_factor": 1.2},
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 6,
            "rope_scaling": YARN | {"truncate": False},
            "pad_token_id": 0,
        },
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 5,
            "first_k_dense_replace": 2,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 12,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 14,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 20,
            "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": False,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"n_inner": None, "bos_token_id": 1, "eos_token_id": 2}),
}


def the_map(case: str) -> Any:
    return gpt_huggingface if case == "gpt2" else llama_huggingface


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, (B, T))


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    """Writes a family's folder once, with the logits of transformers."""

    @functools.cache
    def make(case: str) -> Path:
        path = tmp_path_factory.mktemp(case)
        name, options = CASES[case]
        random_decoder(name, **options).save_pretrained(path)
        return path

    return make


def their_logits(transformers: Any, folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not any(info.values()), info
    return logits_of(model, tokens)


def our_model(folder: Path, case: str) -> Any:
    keys = the_map(case).read_config(json.loads((folder / "config.json").read_text()))
    if case == "gpt2":
        model = filled(lambda: GPT(GPTConfig(**keys), rngs=nnx.Rngs(0)))
    else:
        model = filled(lambda: Llama(LlamaConfig(**keys), rngs=nnx.Rngs(0)))
    return load(model, read_tensors(folder), the_map(case).tensors(keys))


@pytest.mark.quick("gemma2")  # windows, soft caps, norms after layers
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers, folder, tokens, case):
    want = their_logits(transformers, folder(case), tokens)
    model = our_model(folder(case), case)
    check_logits(model, lambda model, tokens: model(tokens), tokens, want)


@pytest.mark.quick("gemma2")
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_transformers(
    transformers, folder, tokens, case, tmp_path
):
    want = their_logits(transformers, folder(case), tokens)
    model = our_model(folder(case), case)
    write_again(model, the_map(case), folder(case), tmp_path)
    np.testing.assert_array_equal(their_logits(transformers, tmp_path, tokens), want)


@pytest.mark.quick("gemma2")
@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt2"])
def test_decoding_gives_the_logits_of_the_whole_text(folder, tokens, case):
    model = our_model(folder(case), case)
    want = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    decode = nnx.jit(lambda model, *inputs: model.decode(*inputs))
    cache, got = model.init_cache(B, T), []
    for start, stop in ((0, 17), (17, 18), (18, T)):
        part = tokens[:, start:stop]
        positions = np.broadcast_to(np.arange(start, stop), part.shape)
        logits, cache = decode(model, part, positions, cache)
        got.append(logits)
    np.testing.assert_allclose(
        jnp.concatenate(got, axis=1), want, rtol=0, atol=1e-5 * np.max(np.abs(want))
    )
