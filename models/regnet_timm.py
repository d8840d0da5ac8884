"""RegNet in timm's folders: config.json and tensor names."""

import math
from collections.abc import Mapping
from typing import Any

from jshard.models.images_huggingface import block_names, conv_norm
from jshard.models.images_timm import find_name, read_sizes, write_json
from jshard.models.tensor_places import convolution, linear
from jshard.storage.hub.file_tensor import FileTensor

# Initial width, slope, multiplier, channels of a group, and blocks (arXiv:2003.13678,
# section 3.3 and appendix B; those of pycls' baselines).
_PARAMETERS = {
    "regnetx_002": (24, 36.44, 2.49, 8, 13),
    "regnetx_004": (24, 24.48, 2.54, 16, 22),
    "regnetx_006": (48, 36.97, 2.24, 24, 16),
    "regnetx_008": (56, 35.73, 2.28, 16, 16),
    "regnetx_016": (80, 34.01, 2.25, 24, 18),
    "regnetx_032": (88, 26.31, 2.25, 48, 25),
    "regnetx_040": (96, 38.65, 2.43, 40, 23),
    "regnetx_064": (184, 60.83, 2.07, 56, 17),
    "regnetx_080": (80, 49.56, 2.88, 120, 23),
    "regnetx_120": (168, 73.36, 2.37, 112, 19),
    "regnetx_160": (216, 55.59, 2.1, 128, 22),
    "regnetx_320": (320, 69.86, 2.0, 168, 23),
    "regnety_002": (24, 36.44, 2.49, 8, 13),
    "regnety_004": (48, 27.89, 2.09, 8, 16),
    "regnety_006": (48, 32.54, 2.32, 16, 15),
    "regnety_008": (56, 38.84, 2.4, 16, 14),
    "regnety_016": (48, 20.71, 2.65, 24, 27),
    "regnety_032": (80, 42.63, 2.66, 24, 21),
    "regnety_040": (96, 31.41, 2.24, 64, 22),
    "regnety_064": (112, 33.22, 2.27, 72, 25),
    "regnety_080": (192, 76.82, 2.19, 56, 17),
    "regnety_120": (168, 73.36, 2.37, 112, 19),
    "regnety_160": (200, 106.23, 2.48, 112, 18),
    "regnety_320": (232, 115.89, 2.53, 232, 20),
    "regnety_640": (352, 147.48, 2.4, 328, 20),
    "regnety_1280": (456, 160.83, 2.52, 264, 27),
    "regnety_2560": (640, 230.83, 2.53, 373, 27),
}


def _sizes(
    name: str,
    first: int,
    slope: float,
    multiplier: float,
    group_width: int,
    blocks: int,
) -> dict[str, Any]:
    """Returns the keys of ``RegNetConfig`` that timm's name stands for.

    Widths of blocks lie on a line, in steps of powers of the multiplier, and then of
    the channels of a group.
    """
    widths: dict[int, int] = {}  # numbers of blocks
    for block in range(blocks):
        power = round(math.log(1 + slope * block / first) / math.log(multiplier))
        width = round(first * multiplier**power / 8) * 8
        widths[width] = widths.get(width, 0) + 1
    steps = [min(group_width, width) for width in widths]
    fitted = [round(w / s) * s for w, s in zip(widths, steps, strict=True)]
    return {
        "stem": 32,
        "stem_stride": 2,
        "depths": tuple(widths.values()),
        "widths": tuple(fitted),
        "group_width": group_width,
        "squeeze_excite": name.startswith("regnety"),
        "downsample_first": True,
    }


_MODELS = {name: _sizes(name, *found) for name, found in _PARAMETERS.items()}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``RegNetConfig`` that a config.json decides."""
    return read_sizes(json, _MODELS, "RegNets X and Y, such as regnety_160")


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    return write_json(find_name(model, _MODELS, "RegNet"), model)


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one block at a time."""
    found = conv_norm("stem", "stem.conv", "stem.bn") | linear("classifier", "head.fc")
    for ours, (stage, block), shortcut in block_names(model):
        theirs = f"s{stage + 1}.b{block + 1}"
        names = {name: name for name in ("conv1", "conv2", "conv3")}
        if shortcut:
            names["shortcut"] = "downsample"
        for own, name in names.items():
            place = f"{theirs}.{name}"
            found |= conv_norm(f"{ours}.{own}", f"{place}.conv", f"{place}.bn")
        if model["squeeze_excite"]:
            for own, name in (("reduce", "fc1"), ("expand", "fc2")):
                found |= convolution(
                    f"{ours}.squeeze_excite.{own}", f"{theirs}.se.{name}"
                )
    return found
