"""What the maps of image classifiers to Hugging Face's folders have in common."""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    OBJECT,
    ConfigJson,
    Sizes,
    read_sizes,
    write_sizes,
)
from jshard.models.tensor_places import convolution, linear, norm
from jshard.storage.hub.file_tensor import FileTensor


def read_keys(config: ConfigJson, sizes: Sizes) -> dict[str, Any]:
    """Returns the keys of a model's config that a config.json decides.

    Raises:
      UserError: a feature of the model is not there.
    """
    model = read_sizes(config, sizes)
    labels = config.get("id2label", None, OBJECT.or_null)
    number = config.get("num_labels", 2, COUNT)
    if labels == {}:
        raise config.error("id2label", "it names no label")
    return {**model, "classes": number if labels is None else len(labels)}


def write_keys(
    model: Mapping[str, Any],
    architecture: str,
    model_type: str,
    sizes: Sizes,
) -> dict[str, Any]:
    """Returns the content of a config.json, as ``read_keys`` reads it."""
    found = write_sizes(model, architecture, model_type, sizes)
    labels = {str(i): f"LABEL_{i}" for i in range(model["classes"])}
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in found.items()},
        "id2label": labels,
        "label2id": {label: int(i) for i, label in labels.items()},
    }


def block_names(
    model: Mapping[str, Any],
) -> list[tuple[str, tuple[int, int], bool]]:
    """Returns (our name, stage and block, whether it has a shortcut) of each block."""
    found, size_in = [], model["stem"]
    for s, (depth, size) in enumerate(
        zip(model["depths"], model["widths"], strict=True)
    ):
        strided = s > 0 or model["downsample_first"]
        for i in range(depth):
            own = f"stages.{s}.rest.{i - 1}" if i else f"stages.{s}.first"
            shortcut = i == 0 and (strided or size_in != size)
            found.append((own, (s, i), shortcut))
        size_in = size
    return found


def stage_tensors(
    model: Mapping[str, Any], family: str, layers: Mapping[str, int]
) -> dict[str, FileTensor]:
    """Returns where transformers' files keep the convolutions of a ``ConvNet``.

    The family is "resnet" or "regnet"; ``layers`` has our names of a block's
    ``ConvNorm``, and their numbers.
    """
    found = _conv_norm("stem", f"{family}.embedder.embedder")
    found |= linear("classifier", "classifier.1")
    for ours, (stage, block), shortcut in block_names(model):
        theirs = f"{family}.encoder.stages.{stage}.layers.{block}"
        for own, number in layers.items():
            found |= _conv_norm(f"{ours}.{own}", f"{theirs}.layer.{number}")
        if shortcut:
            found |= _conv_norm(f"{ours}.shortcut", f"{theirs}.shortcut")
    return found


def _conv_norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    return conv_norm(ours, f"{theirs}.convolution", f"{theirs}.normalization")


def conv_norm(ours: str, conv: str, bn: str) -> dict[str, FileTensor]:
    """Returns where the files keep a ``ConvNorm``, with its batch statistics."""
    found = convolution(f"{ours}.convolution", conv, bias=False)
    return found | norm(f"{ours}.normalization", bn)
