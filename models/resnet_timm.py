"""ResNet in timm's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

from jshard.models.images_huggingface import block_names, conv_norm
from jshard.models.images_timm import find_name, read_sizes, write_json
from jshard.models.tensor_places import linear
from jshard.storage.hub.file_tensor import FileTensor

_BASIC, _BOTTLENECK = (64, 128, 256, 512), (256, 512, 1024, 2048)
_SHAPES = {
    "resnet18": ((2, 2, 2, 2), _BASIC),
    "resnet34": ((3, 4, 6, 3), _BASIC),
    "resnet26": ((2, 2, 2, 2), _BOTTLENECK),
    "resnet50": ((3, 4, 6, 3), _BOTTLENECK),
    "resnet101": ((3, 4, 23, 3), _BOTTLENECK),
    "resnet152": ((3, 8, 36, 3), _BOTTLENECK),
}
_MODELS = {
    name: {
        "stem": 64,
        "depths": depths,
        "widths": widths,
        "bottleneck": widths == _BOTTLENECK,
        "downsample_first": False,
    }
    for name, (depths, widths) in _SHAPES.items()
}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``ResNetConfig`` that a config.json decides."""
    return read_sizes(json, _MODELS, ", ".join(_MODELS))


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return write_json(find_name(model, _MODELS, "ResNet"), model)


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one block at a time."""
    found = conv_norm("stem", "conv1", "bn1") | linear("classifier", "fc")
    for ours, (stage, block), shortcut in block_names(model):
        theirs = f"layer{stage + 1}.{block}"
        for i in range(3 if model["bottleneck"] else 2):
            conv, bn = f"{theirs}.conv{i + 1}", f"{theirs}.bn{i + 1}"
            found |= conv_norm(f"{ours}.layers.{i}", conv, bn)
        if shortcut:
            place = f"{theirs}.downsample"
            found |= conv_norm(f"{ours}.shortcut", f"{place}.0", f"{place}.1")
    return found
