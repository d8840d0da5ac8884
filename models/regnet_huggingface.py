"""RegNet in Hugging Face's folders: config.json and tensor names."""

from collections.abc import Mapping
from typing import Any

import jshard
from jshard.models.huggingface_config import COUNT, COUNTS, FLAG, ConfigJson, one_of
from jshard.models.images_huggingface import (
    block_names,
    read_keys,
    stage_tensors,
    write_keys,
)
from jshard.models.tensor_places import convolution
from jshard.storage.hub.file_tensor import FileTensor

_NAME = "RegNetForImageClassification"
_SIZES = {
    "channels": ("num_channels", 3, COUNT),
    "stem": ("embedding_size", 32, COUNT),
    "depths": ("depths", (2, 6, 12, 2), COUNTS),
    "widths": ("hidden_sizes", (128, 192, 512, 1088), COUNTS),
    "group_width": ("groups_width", 64, COUNT),
    "downsample_first": ("downsample_in_first_stage", True, FLAG),
}
_FIXED = {"hidden_act": ("relu",)}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``RegNetConfig`` that a config.json decides."""
    config = ConfigJson.of(json, [_NAME], _FIXED)
    model = read_keys(config, _SIZES)
    squeeze_excite = config.get("layer_type", "y", one_of("xy")) == "y"
    config.finish(["is_encoder_decoder"])
    return {**model, "stem_stride": 2, "squeeze_excite": squeeze_excite}


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    if model["stem_stride"] != 2:
        raise jshard.UserError(
            f"model.stem_stride={model['stem_stride']} is not possible in "
            f"transformers, whose {_NAME} has 2"
        )
    return {
        **write_keys(model, _NAME, "regnet", _SIZES),
        "layer_type": "y" if model["squeeze_excite"] else "x",
        "hidden_act": "relu",
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one block at a time."""
    if not model["squeeze_excite"]:
        return stage_tensors(model, "regnet", {"conv1": 0, "conv2": 1, "conv3": 2})
    found = stage_tensors(model, "regnet", {"conv1": 0, "conv2": 1, "conv3": 3})
    for ours, (stage, block), _ in block_names(model):
        theirs = f"regnet.encoder.stages.{stage}.layers.{block}.layer.2.attention"
        for own, number in (("reduce", 0), ("expand", 2)):
            place = f"{ours}.squeeze_excite.{own}"
            found |= convolution(place, f"{theirs}.{number}")
    return found
