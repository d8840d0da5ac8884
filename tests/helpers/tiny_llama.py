"""A tiny Llama as Hugging Face's folder, random, with a tokenizer; without PyTorch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from small_tokenizer import make_tokenizer

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 32, 48, 2, 4, 2, 384
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def _shapes() -> dict[str, tuple[int, ...]]:
    heads = WIDTH // HEADS
    layer = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KV_HEADS * heads, WIDTH),
        "self_attn.v_proj": (KV_HEADS * heads, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in layer.items()
    }
    return shapes | {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }


def make_llama(folder: Path, *, seed: int = 0, files: int = 1) -> Path:
    """Writes the folder; with an index of `files` files of tensors if not of one."""
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    draw = np.random.default_rng(seed).normal
    tensors = {
        name: draw(0, 0.05, shape).astype(np.float32)
        for name, shape in _shapes().items()
    }
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::files]}
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    content = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(content)
    return folder
