"""What the maps of image classifiers to timm's folders have in common.

Such a folder, as timm's hub has them, names an architecture in its config.json, whose
sizes are in timm's code, and the arguments that change them.
"""

from collections.abc import Mapping
from typing import Any

import jshard
from jshard.models.images import MEAN, STD

Json = Mapping[str, Any]
# Arguments that leave a model in evaluation as it is.
_FREE = ("drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate")


def read_arguments(json: Json, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns timm's arguments of the model of a config.json.

    Args:
      json: its content.
      known: arguments that a map knows, with their defaults; and "num_classes",
        "in_chans", "img_size", "global_pool".

    Raises:
      UserError: there is another argument.
    """
    name, given = json["architecture"], dict(json.get("model_args") or {})
    about = json.get("pretrained_cfg") or json  # some have no such group
    channels, size, _ = about.get("input_size") or (3, 224, 224)
    classes = json.get("num_classes") or about.get("num_classes", 1000)
    defaults = {"num_classes": classes, "in_chans": channels, "img_size": size, **known}
    for key, value in given.items():
        if key not in defaults and key not in _FREE and value is not None:
            raise jshard.UserError(
                f"config.json: {key}={value!r} of timm's {name} is not supported"
            )
    found = {key: given.get(key) for key in defaults}
    return {k: defaults[k] if v is None else v for k, v in found.items()}


def read_sizes(json: Json, models: Mapping[str, Json], known: str) -> dict[str, Any]:
    """Returns the keys of a convolutional model's config that a config.json decides.

    ``models`` has the keys that each of timm's names stands for; ``known`` is what to
    call the names in an error.

    Raises:
      UserError: the architecture, or a feature of it, is not there.
    """
    name = json["architecture"]
    if name not in models:
        raise unknown_architecture(json, known)
    given = read_arguments(json, {"global_pool": "avg"})
    own = {"channels": given["in_chans"], "classes": given["num_classes"]}
    return {**models[name], **own}


def unknown_architecture(json: Json, known: str) -> jshard.UserError:
    """Returns the error of an architecture that a map has not."""
    return jshard.UserError(
        f"config.json: timm's architecture {json['architecture']} is not supported; "
        f"those are {known}"
    )


def find_name(model: Json, models: Mapping[str, Json], what: str) -> str:
    """Returns timm's name of a model, given as the keys of its config.

    `models` and `what`, what to call them, are as for `read_sizes`.

    Raises:
      UserError: timm has no such model.
    """
    # A checkpoint has lists for tuples.
    own = {k: tuple(v) if isinstance(v, list) else v for k, v in model.items()}
    for name, sizes in models.items():
        if all(own[key] == value for key, value in sizes.items()):
            return name
    raise jshard.UserError(
        f"timm has no {what} of these model.* sizes; it has {', '.join(models)}"
    )


def write_json(
    name: str, model: Json, size: int = 224, pool: str = "avg", **arguments: Any
) -> dict[str, Any]:
    """Returns the content of a config.json, as ``read_arguments`` reads it."""
    shape, classes = [model["channels"], size, size], model["classes"]
    common = {"num_classes": classes, "in_chans": model["channels"]}
    mean, std = (MEAN, STD) if shape[0] == 3 else ((MEAN[1],), (STD[1],))
    about = {
        "input_size": shape,
        "num_classes": classes,
        "mean": list(mean),
        "std": list(std),
        "interpolation": "bilinear",
        "crop_pct": 0.875,
    }
    return {
        "architecture": name,
        "num_classes": classes,
        "global_pool": pool,
        "model_args": {**common, **arguments},
        "pretrained_cfg": about,
    }
