"""Small models and rotations, and what transformers makes of them.

``python tests/huggingface/recorded.py``, where transformers and torch are installed,
writes recorded.json; a slow test compares it with what is installed.
"""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FILE = Path(__file__).with_name("recorded.json")
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])

_LLAMA = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "unk_token_id": 0,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 3}
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
_T5 = {
    "vocab_size": 12,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 20,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}
# The content of each config.json, without its type.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {**_LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", {**_LLAMA, **_GEMMA}),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {**_LLAMA, **_GEMMA}),
    "phi3": ("Phi3ForCausalLM", "phi3", _LLAMA),
    "mixtral": (
        "MixtralForCausalLM",
        "mixtral",
        {**_LLAMA, **_EXPERTS, "num_local_experts": 3},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_LLAMA, **_EXPERTS, "num_experts": 3, "moe_intermediate_size": 20},
    ),
    "t5": ("T5ForConditionalGeneration", "t5", _T5),
}

_LENGTH = {"original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, **_LENGTH}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **_LENGTH}
# ``rope_parameters`` of a Llama with head_dim 64.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, **_LLAMA3
    },
    "yarn": {**_YARN, "rope_theta": 1e4, "original_max_position_embeddings": 4096},
    "yarn-betas": {**_YARN, "rope_theta": 100.0, "beta_fast": 3.0, "beta_slow": 0.5},
    "yarn-late": {**_YARN, "rope_theta": 100.0, "beta_fast": 2.0, "beta_slow": 16.0},
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """The content of a model's config.json."""
    architecture, model_type, content = MODELS[name]
    return {"architectures": [architecture], "model_type": model_type, **content}


def rope_config(name: str) -> dict[str, Any]:
    """The config.json of a Llama with these rotary positions."""
    return config_of("llama") | {"head_dim": 64, "rope_parameters": ROPES[name]}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a file, of its name and shape alone."""
    phase = zlib.crc32(name.encode()) % 10_000
    values = np.sin(phase + 1.7 * np.arange(np.prod(shape)) ** 1.1)
    return values.reshape(shape).astype(np.float32)


def record() -> dict[str, Any]:
    """What transformers says of all of it."""
    return {
        "models": {name: _record_model(name) for name in MODELS},
        "ropes": {name: _record_rope(name) for name in ROPES},
    }


def _record_model(name: str) -> dict[str, Any]:
    """Shapes of a model's tensors in its files, and the last token's logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    content = config_of(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(content))
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, content["architectures"][0])
        made = kind(config)
        if name == "t5":  # transformers 5 ties every new head
            made.lm_head.weight = torch.nn.Parameter(torch.zeros(12, 16))
        made.save_pretrained(folder)
        weights = Path(folder) / "model.safetensors"
        shapes = {key: list(x.shape) for key, x in load_file(weights).items()}
        tensors = {key: tensor(key, tuple(shape)) for key, shape in shapes.items()}
        save_file(tensors, weights, {"format": "pt"})
        model = kind.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
    tokens = torch.tensor(TOKENS)
    inputs = {"decoder_input_ids": tokens} if name == "t5" else {}
    with torch.no_grad():
        logits = model.eval()(tokens, **inputs).logits[0, -1]
    return {"shapes": shapes, "logits": [round(float(x), 6) for x in logits]}


def _record_rope(name: str) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    llama = transformers.models.llama.modeling_llama
    rotary = llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**rope_config(name)))
    return {
        "frequencies": [float(f"{x:.7g}") for x in rotary.inv_freq.tolist()],
        "amplitude": float(rotary.attention_scaling),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1) + "\n")
