"""Vision transformers in Hugging Face's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import COUNT, FLAG, NUMBER, ConfigJson
from jshard.models.images_huggingface import read_keys, write_keys
from jshard.models.tensor_places import convolution, layer_norm, linear
from jshard.storage.hub.file_tensor import FileTensor

_NAME = "ViTForImageClassification"
_SIZES = {
    "image_size": ("image_size", 224, COUNT),
    "patch_size": ("patch_size", 16, COUNT),
    "channels": ("num_channels", 3, COUNT),
    "num_layers": ("num_hidden_layers", 12, COUNT),
    "num_heads": ("num_attention_heads", 12, COUNT),
    "width": ("hidden_size", 768, COUNT),
    "hidden_width": ("intermediate_size", 3072, COUNT),
    "qkv_bias": ("qkv_bias", True, FLAG),
    "norm_eps": ("layer_norm_eps", 1e-12, NUMBER),
}
_FIXED = {"hidden_act": ("gelu",)}
# What changes nothing: dropout is of training, and the others of other tasks.
_INERT = """
    attention_probs_dropout_prob encoder_stride hidden_dropout_prob is_encoder_decoder
    pooler_act pooler_output_size
    """.split()


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``ViTConfig`` that a config.json decides."""
    config = ConfigJson.of(json, [_NAME], _FIXED)
    model = read_keys(config, _SIZES)
    config.finish(_INERT)
    return model


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return {**write_keys(model, _NAME, "vit", _SIZES), "hidden_act": "gelu"}


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    embeddings = "vit.embeddings"
    found = {
        "class_token": FileTensor((f"{embeddings}.cls_token",)),
        "positions": FileTensor((f"{embeddings}.position_embeddings",)),
    }
    found |= convolution("patches", f"{embeddings}.patch_embeddings.projection")
    found |= layer_norm("norm", "vit.layernorm")
    found |= linear("classifier", "classifier")
    for i in range(model["num_layers"]):
        ours, theirs = f"blocks.{i}", f"vit.encoder.layer.{i}"
        for own, name in (("norm1", "before"), ("norm2", "after")):
            found |= layer_norm(f"{ours}.{own}", f"{theirs}.layernorm_{name}")
        for name in ("query", "key", "value"):
            found |= linear(
                f"{ours}.attention.{name}",
                f"{theirs}.attention.attention.{name}",
                bias=model["qkv_bias"],
            )
        for own, name in (
            ("attention.out", "attention.output"),
            ("up", "intermediate"),
            ("down", "output"),
        ):
            found |= linear(f"{ours}.{own}", f"{theirs}.{name}.dense")
    return found
