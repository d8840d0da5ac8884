"""GPT-2 in Hugging Face's folders: config.json and tensor names.

transformers' Conv1D keeps kernels as Flax does, (in, out), and its fused queries, keys
and values are in our order, so that nothing is transposed. Files of ``GPT2Model``, and
those that openai-community has published, lack the prefix "transformer.".
"""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    FLAG,
    ConfigJson,
    read_sizes,
    write_sizes,
)
from jshard.models.tensor_places import linear
from jshard.storage.hub.file_tensor import FileTensor

_NAME, _BASE = "GPT2LMHeadModel", "GPT2Model"
_PREFIX = "transformer."
# The table of a tied head, and what the files call a head of its own.
TIED_HEAD = ("embed.embedding", "lm_head.weight")
# What models/gpt.py computes; config.json may say it in these ways, or not at all.
_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# Our keys, and config.json's with their defaults and kinds.
_SIZES = {
    "vocab_size": ("vocab_size", 50257, COUNT),
    "sequence_length": ("n_positions", 1024, COUNT),
    "num_layers": ("n_layer", 12, COUNT),
    "num_heads": ("n_head", 12, COUNT),
    "width": ("n_embd", 768, COUNT),
    "tied": ("tie_word_embeddings", True, FLAG),
}
# What changes nothing: dropout, the order of operations, heads for other tasks.
_INERT = """
    attn_pdrop embd_pdrop is_decoder is_encoder_decoder n_ctx reorder_and_upcast_attn
    resid_pdrop summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj
    """.split()
UNTIED = {"tied": False}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``GPTConfig`` that a config.json decides."""
    config = ConfigJson.of(json, (_NAME, _BASE), _FIXED, {"gpt2": _NAME})
    model = read_sizes(config, _SIZES)
    config.fix("n_inner", (None, 4 * model["width"]))
    config.finish(_INERT)
    return model


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return {
        **write_sizes(model, _NAME, "gpt2", _SIZES),
        "n_ctx": model["sequence_length"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    found = {
        "embed.embedding": _tensor("wte.weight"),
        "positions.embedding": _tensor("wpe.weight"),
        "norm.scale": _tensor("ln_f.weight"),
        "norm.bias": _tensor("ln_f.bias"),
    }
    if not model["tied"]:
        found |= linear("head", "lm_head", bias=False)
    weights = {
        "norm1.scale": "ln_1",
        "attention.qkv.kernel": "attn.c_attn",
        "attention.out.kernel": "attn.c_proj",
        "norm2.scale": "ln_2",
        "up.kernel": "mlp.c_fc",
        "down.kernel": "mlp.c_proj",
    }
    for i in range(model["num_layers"]):
        for ours, theirs in weights.items():
            module, _, _ = ours.rpartition(".")
            found[f"blocks.{i}.{ours}"] = _tensor(f"h.{i}.{theirs}.weight")
            found[f"blocks.{i}.{module}.bias"] = _tensor(f"h.{i}.{theirs}.bias")
    return found


def _tensor(name: str) -> FileTensor:
    return FileTensor((_PREFIX + name,), older=((name,),))
