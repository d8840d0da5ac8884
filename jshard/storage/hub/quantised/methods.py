"""Which quantised folders can be read, by their config.json and by their tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from jshard.storage.hub.quantised import bitsandbytes
from jshard.storage.hub.quantised.fp8 import BLOCK

WHAT_WORKS = (
    "give the folder of the unquantised model, or one in bitsandbytes' nf4 or fp4, in "
    f"MXFP4 (gpt-oss), or in FP8 by blocks of {BLOCK} x {BLOCK} (DeepSeek-V3, Qwen 3)"
)
# How the names of tensors end in folders of other methods.
_ENDS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors, or FP8 with a scale for each tensor",
    ".weight_scale_inv": f"FP8 in other blocks than {BLOCK} x {BLOCK}",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes in 8 bits",
    ".W_q": "HQQ",
    ".codebooks": "AQLM",
}


def problem_of_config(config: Mapping[str, Any]) -> str:
    """Returns what of a ``quantization_config`` cannot be read; "" if all can."""
    method = config.get("quant_method") or "quantization_config"
    if method == "bitsandbytes":
        return bitsandbytes.problem_of_config(config)
    if method == "fp8":
        return _problem_of_fp8(config)
    if method == "mxfp4":
        return ""
    layout = config.get("format")
    return f"{method}, {layout}" if layout else str(method)


def _problem_of_fp8(config: Mapping[str, Any]) -> str:
    known = {
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "expert_dtype": "fp8",
    }
    other = [key for key, value in known.items() if config.get(key, value) != value]
    return f"fp8 with {other[0]}={config[other[0]]!r}" if other else ""


def parts(names: Iterable[str]) -> dict[str, str]:
    """Returns the names that other methods give to tensors, and their methods."""
    return {
        name: method
        for name in names
        for end, method in _ENDS.items()
        if name.endswith(end)
    }
