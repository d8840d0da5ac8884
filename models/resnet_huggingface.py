"""ResNet in Hugging Face's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import COUNT, COUNTS, FLAG, ConfigJson, one_of
from jshard.models.images_huggingface import read_keys, stage_tensors, write_keys
from jshard.storage.hub.file_tensor import FileTensor

_NAME = "ResNetForImageClassification"
_SIZES = {
    "channels": ("num_channels", 3, COUNT),
    "stem": ("embedding_size", 64, COUNT),
    "depths": ("depths", (3, 4, 6, 3), COUNTS),
    "widths": ("hidden_sizes", (256, 512, 1024, 2048), COUNTS),
    "downsample_first": ("downsample_in_first_stage", False, FLAG),
}
_FIXED = {
    "hidden_act": ("relu",),
    "downsample_in_bottleneck": (False,),
}
# What changes nothing: what a backbone returns.
_INERT = ("is_encoder_decoder", "out_features", "out_indices", "stage_names")


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``ResNetConfig`` that a config.json decides."""
    config = ConfigJson.of(json, [_NAME], _FIXED)
    model = read_keys(config, _SIZES)
    kind = config.get("layer_type", "bottleneck", one_of(["basic", "bottleneck"]))
    config.finish(_INERT)
    return {**model, "bottleneck": kind == "bottleneck"}


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return {
        **write_keys(model, _NAME, "resnet", _SIZES),
        "layer_type": "bottleneck" if model["bottleneck"] else "basic",
        "hidden_act": "relu",
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one block at a time."""
    layers = {f"layers.{i}": i for i in range(3 if model["bottleneck"] else 2)}
    return stage_tensors(model, "resnet", layers)
