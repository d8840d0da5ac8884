"""T5 in Hugging Face's folders: config.json and tensor names, of v1.0 and v1.1.

transformers 5 ties the head of every config, keeps it apart if the file has its own
weights, and says by ``scale_decoder_outputs`` which of the two a model was. Version 4
says all of that by ``tie_word_embeddings``. Both are read, and the latter is written.
"""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    ConfigJson,
    one_of,
    read_sizes,
    write_sizes,
)
from jshard.models.tensor_places import linear
from jshard.storage.hub.file_tensor import FileTensor

_NAME = "T5ForConditionalGeneration"
_ALSO = {"T5WithLMHeadModel": _NAME, "t5": _NAME}
# Our keys, and config.json's with their defaults and kinds.
_SIZES = {
    "vocab_size": ("vocab_size", 32128, COUNT),
    "num_layers": ("num_layers", 6, COUNT),
    "num_heads": ("num_heads", 8, COUNT),
    "head_width": ("d_kv", 64, COUNT),
    "width": ("d_model", 512, COUNT),
    "hidden": ("d_ff", 2048, COUNT),
    "buckets": ("relative_attention_num_buckets", 32, COUNT),
    "max_distance": ("relative_attention_max_distance", 128, COUNT),
    "norm_eps": ("layer_norm_epsilon", 1e-6, NUMBER),
}
# The MLP's activation, by its name, and what transformers derives from that.
_ACTIVATIONS = {"relu": ("relu", False), "gated-gelu": ("gelu_new", True)}
# What changes nothing: dropout, and what older files say of their positions.
_INERT = ("dropout_rate", "is_decoder", "n_positions")


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``T5Config`` that a config.json decides."""
    config = ConfigJson.of(json, [_NAME], also=_ALSO)
    model = read_sizes(config, _SIZES)
    mlp = config.get("feed_forward_proj", "relu", one_of(_ACTIVATIONS))
    activation, gated = _ACTIVATIONS[mlp]
    config.fix("dense_act_fn", [activation])
    config.fix("is_gated_act", [gated])
    config.fix("is_encoder_decoder", [True])
    decoder_layers = config.get("num_decoder_layers", None, COUNT.or_null)
    start = config.get("decoder_start_token_id", None, INTEGER.or_null)
    tied = config.get("tie_word_embeddings", None, FLAG.or_null) is not False
    scaled = config.get("scale_decoder_outputs", tied, FLAG)
    if scaled and not tied:
        raise config.error("scale_decoder_outputs", "tie_word_embeddings is false")
    config.finish(_INERT)
    return model | {
        "num_decoder_layers": decoder_layers or model["num_layers"],
        "start_token": start or 0,
        "gated": gated,
        "tied": scaled,
    }


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return {
        **write_sizes(model, _NAME, "t5", _SIZES),
        "is_encoder_decoder": True,
        "num_decoder_layers": model["num_decoder_layers"],
        "decoder_start_token_id": model["start_token"],
        "feed_forward_proj": "gated-gelu" if model["gated"] else "relu",
        "tie_word_embeddings": model["tied"],
        "dropout_rate": model.get("dropout", 0.0),
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    found = {"embed.embedding": FileTensor(("shared.weight",))}
    if not model["tied"]:
        found |= linear("head", "lm_head", bias=False)
    sides = {
        "encoder": (model["num_layers"], ()),
        "decoder": (model["num_decoder_layers"], (("cross", "EncDecAttention"),)),
    }
    up = {"up": "wi_1", "gate": "wi_0"} if model["gated"] else {"up": "wi"}
    for side, (layers, crosses) in sides.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{side}_bias.embedding"] = FileTensor((bias,))
        norm = f"{side}.final_layer_norm.weight"
        found[f"{side}_norm.scale"] = FileTensor((norm,))
        branches = (("attention", "SelfAttention"), *crosses, ("mlp", "DenseReluDense"))
        for i in range(layers):
            for number, (ours, theirs) in enumerate(branches):
                own, layer = f"{side}.{i}", f"{side}.block.{i}.layer.{number}"
                norm = FileTensor((f"{layer}.layer_norm.weight",))
                found[f"{own}.norm{number + 1}.scale"] = norm
                matrices = {"q": "q", "k": "k", "v": "v", "out": "o"}
                if ours == "mlp":
                    matrices = {**up, "down": "wo"}
                for kernel, name in matrices.items():
                    place = f"{layer}.{theirs}.{name}"
                    found |= linear(f"{own}.{ours}.{kernel}", place, bias=False)
    return found
