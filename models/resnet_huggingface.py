"""ResNet in Hugging Face's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

from jshard.hub.file_tensor import FileTensor
from jshard.models.huggingface_config import COUNT, COUNTS, FLAG, ConfigJson, one_of
from jshard.models.images_huggingface import (
    block_names,
    conv_norm,
    linear,
    read_keys,
    write_keys,
)

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
    """Returns the keys of ``ResNetConfig`` that a config.json decides.

    Args:
      json: its content.

    Raises:
      UserError: the architecture, or a feature of it, is not there.
    """
    config = ConfigJson.of(json, [_NAME])
    model = read_keys(config, _SIZES, _FIXED)
    kind = config.get("layer_type", "bottleneck", one_of(["basic", "bottleneck"]))
    config.finish(_INERT)
    return {**model, "bottleneck": kind == "bottleneck"}


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model.

    Args:
      model: keys of ``ResNetConfig``.
    """
    return {
        **write_keys(model, _NAME, "resnet", _SIZES),
        "layer_type": "bottleneck" if model["bottleneck"] else "basic",
        "hidden_act": "relu",
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one block at a time.

    Args:
      model: keys of ``ResNetConfig``.
    """
    found = conv_norm("stem", "resnet.embedder.embedder")
    found |= linear("classifier", "classifier.1")
    for ours, (stage, block), shortcut in block_names(model):
        theirs = f"resnet.encoder.stages.{stage}.layers.{block}"
        for i in range(3 if model["bottleneck"] else 2):
            found |= conv_norm(f"{ours}.layers.{i}", f"{theirs}.layer.{i}")
        if shortcut:
            found |= conv_norm(f"{ours}.shortcut", f"{theirs}.shortcut")
    return found
