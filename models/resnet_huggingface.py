"""ResNet in Hugging Face's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

from jshard.checkpoint.file_tensor import FileTensor
from models.images_huggingface import (
    block_names,
    conv_norm,
    linear,
    read_keys,
    write_keys,
)

_NAME = "ResNetForImageClassification"
_SIZES = {
    "channels": ("num_channels", 3),
    "stem": ("embedding_size", 64),
    "depths": ("depths", (3, 4, 6, 3)),
    "widths": ("hidden_sizes", (256, 512, 1024, 2048)),
    "downsample_first": ("downsample_in_first_stage", False),
}
_FIXED = {
    "hidden_act": ("relu",),
    "layer_type": ("basic", "bottleneck"),
    "downsample_in_bottleneck": (False,),
}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``ResNetConfig`` that a config.json decides.

    Args:
      json: its content.

    Raises:
      UserError: the architecture, or a feature of it, is not there.
    """
    model = read_keys(json, _NAME, _SIZES, _FIXED)
    bottleneck = json.get("layer_type", "bottleneck") == "bottleneck"
    return {**model, "bottleneck": bottleneck}


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
