"""What the maps of image classifiers to Hugging Face's folders have in common."""

from collections.abc import Mapping
from typing import Any

from jshard.hub.file_tensor import FileTensor
from jshard.models.huggingface_config import (
    COUNT,
    OBJECT,
    ConfigJson,
    Sizes,
    read_sizes,
    write_sizes,
)

_NORM = {
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def read_keys(
    config: ConfigJson, sizes: Sizes, fixed: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Returns the keys of a model's config that a config.json decides.

    Args:
      config: a config.json.
      sizes: our keys, and config.json's with their defaults and kinds.
      fixed: config.json's keys, and the values that we know, which include the default.

    Raises:
      UserError: a feature of the model is not there.
    """
    for key, values in fixed.items():
        config.fix(key, values)
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


def linear(ours: str, theirs: str, bias: bool = True) -> dict[str, FileTensor]:
    """Returns where the files keep a linear layer."""
    found = {f"{ours}.kernel": FileTensor((f"{theirs}.weight",), transposed=True)}
    return found | _bias(ours, theirs) if bias else found


def convolution(ours: str, theirs: str, bias: bool = True) -> dict[str, FileTensor]:
    """Returns where the files keep a convolution."""
    found = {f"{ours}.kernel": FileTensor((f"{theirs}.weight",), convolution=True)}
    return found | _bias(ours, theirs) if bias else found


def conv_norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    """Returns where the files keep a ``ConvNorm``, with its batch statistics."""
    return convolution(
        f"{ours}.convolution", f"{theirs}.convolution", bias=False
    ) | norm(f"{ours}.normalization", f"{theirs}.normalization")


def norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    """Returns where the files keep a batch norm, with its statistics."""
    return {
        f"{ours}.{own}": FileTensor((f"{theirs}.{name}",))
        for own, name in _NORM.items()
    }


def layer_norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    """Returns where the files keep a layer norm."""
    scale = {f"{ours}.scale": FileTensor((f"{theirs}.weight",))}
    return scale | _bias(ours, theirs)


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


def _bias(ours: str, theirs: str) -> dict[str, FileTensor]:
    return {f"{ours}.bias": FileTensor((f"{theirs}.bias",))}
