"""Vision transformers in timm's folders: config.json and tensor names."""

import re
from collections.abc import Mapping
from typing import Any

import jshard
from jshard.models.images_timm import read_arguments, unknown_architecture, write_json
from jshard.models.tensor_places import convolution, layer_norm, linear
from jshard.storage.hub.file_tensor import FileTensor

# Width, layers and heads.
_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
_NAME = re.compile(rf"(?:vit|deit)_({'|'.join(_SIZES)})_patch(\d+)_(\d+)")
_EPS = 1e-6


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``ViTConfig`` that a config.json decides."""
    name = _NAME.fullmatch(json["architecture"])
    if name is None:
        raise unknown_architecture(
            json, "vit_SIZE_patchP_N and deit_SIZE_patchP_N, tiny to huge"
        )
    width, layers, heads = _SIZES[name[1]]
    known = {
        "img_size": int(name[3]),
        "patch_size": int(name[2]),
        "embed_dim": width,
        "depth": layers,
        "num_heads": heads,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
    }
    given = read_arguments(json, {**known, "global_pool": "token"})
    pool = given["global_pool"]
    if pool != "token" or json.get("global_pool", pool) != "token":
        raise jshard.UserError(
            f"config.json: global_pool={json.get('global_pool', pool)!r} of timm's "
            f"{json['architecture']} is not supported; only 'token' is"
        )
    return {
        "image_size": _side(given, "img_size"),
        "patch_size": _side(given, "patch_size"),
        "channels": given["in_chans"],
        "classes": given["num_classes"],
        "num_layers": given["depth"],
        "num_heads": given["num_heads"],
        "width": given["embed_dim"],
        "hidden_width": int(given["embed_dim"] * given["mlp_ratio"]),
        "qkv_bias": given["qkv_bias"],
        "norm_eps": _EPS,
    }


def _side(given: Mapping[str, Any], key: str) -> int:
    """Returns the side of a square, which timm writes as one number or as two."""
    value = given[key]
    side, *others = value if isinstance(value, list | tuple) else (value,)
    if any(other != side for other in others):
        raise jshard.UserError(
            f"config.json: {key}={value} is not supported; both sides must be equal"
        )
    return side


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    if model["norm_eps"] != _EPS:
        raise jshard.UserError(
            f"model.norm_eps={model['norm_eps']} is not possible in timm, whose vision "
            f"transformers have {_EPS}"
        )
    shape = model["width"], model["num_layers"], model["num_heads"]
    size = next((name for name, found in _SIZES.items() if found == shape), "base")
    patch, side = model["patch_size"], model["image_size"]
    return write_json(
        f"vit_{size}_patch{14 if size == 'huge' else 16}_224",
        model,
        side,
        "token",
        img_size=side,
        patch_size=patch,
        embed_dim=model["width"],
        depth=model["num_layers"],
        num_heads=model["num_heads"],
        mlp_ratio=model["hidden_width"] / model["width"],
        qkv_bias=model["qkv_bias"],
        global_pool="token",
    )


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    found = {
        "class_token": FileTensor(("cls_token",)),
        "positions": FileTensor(("pos_embed",)),
    }
    found |= convolution("patches", "patch_embed.proj")
    found |= layer_norm("norm", "norm") | linear("classifier", "head")
    for i in range(model["num_layers"]):
        ours = theirs = f"blocks.{i}"
        for name in ("norm1", "norm2"):
            found |= layer_norm(f"{ours}.{name}", f"{theirs}.{name}")
        for number, own in enumerate(("query", "key", "value")):
            fused = linear(
                f"{ours}.attention.{own}", f"{theirs}.attn.qkv", model["qkv_bias"]
            )
            found |= {
                name: place._replace(part=(number, 3)) for name, place in fused.items()
            }
        for own, name in (
            ("attention.out", "attn.proj"),
            ("up", "mlp.fc1"),
            ("down", "mlp.fc2"),
        ):
            found |= linear(f"{ours}.{own}", f"{theirs}.{name}")
    return found
