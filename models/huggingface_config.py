"""Reading and writing config.json of Hugging Face's folders, for all models' maps."""

from collections.abc import Collection, Mapping
from typing import Any

import jshard

Json = Mapping[str, Any]
Sizes = Mapping[str, tuple[str, Any]]


def read_architecture(json: Json, known: Collection[str]) -> str:
    """Returns the name of the model's class.

    Args:
      json: the content of config.json.
      known: the names that a map is for.

    Raises:
      UserError: it is another one.
    """
    name = (json.get("architectures") or ["none"])[0]
    if name not in known:
        those = "that is" if len(known) == 1 else "those are"
        raise jshard.UserError(
            f"config.json: architecture {name} is not supported; {those} "
            f"{', '.join(known)}"
        )
    return name


def check_features(json: Json, name: str, known: Mapping[str, Collection[Any]]) -> None:
    """Raises a UserError if a feature of the model is not there.

    Args:
      json: the content of config.json.
      name: of the model's class.
      known: keys, which may be missing, and the values that a model of ours has.
    """
    for key, values in {**known, "quantization_config": ()}.items():
        if json.get(key) is not None and json[key] not in tuple(values):
            those = f"; those are {', '.join(map(str, values))}" if values else ""
            raise jshard.UserError(
                f"config.json: {key}={json[key]!r} of {name} is not supported{those}"
            )


def read_sizes(json: Json, sizes: Sizes) -> dict[str, Any]:
    """Returns keys of a model's config.

    Args:
      json: the content of config.json.
      sizes: our keys, and config.json's with the defaults of what is missing or null.
    """
    found = {ours: json.get(key) for ours, (key, _) in sizes.items()}
    return {
        ours: sizes[ours][1] if value is None else value
        for ours, value in found.items()
    }


def write_sizes(
    model: Mapping[str, Any], architecture: str, model_type: str, sizes: Sizes
) -> dict[str, Any]:
    """Returns the content of a config.json, as ``read_sizes`` reads it."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{theirs: model[ours] for ours, (theirs, _) in sizes.items()},
    }
