"""Mixtures of several sources of examples, by weight."""

import math
from collections.abc import Mapping
from pathlib import Path

import grain

from jshard.system.errors import UserError


def is_mixture(text: str) -> bool:
    """Returns whether something in a text has a weight; "hf://..." has none."""
    ends = [part.rpartition(":") for part in text.split(",")]
    weighs = any(colon and "/" not in end for _, colon, end in ends)
    return weighs and not Path(text).exists()


def parse_mixture(text: str, key: str) -> dict[str, float]:
    """Returns the weights of sources by path, from "PATH:WEIGHT,PATH:WEIGHT".

    `key` is the key of the config, for messages.

    Raises:
      UserError: The text is not of this form, or a weight is not above 0.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        path, colon, number = part.strip().rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not colon or not path or not 0 < weight < math.inf:
            raise UserError(
                f"{key}: {part.strip()!r} must be PATH:WEIGHT with a weight above 0, "
                "as in web:0.7,code:0.3"
            )
        if path in weights:
            raise UserError(f"{key}: {path} is there twice; add its weights")
        weights[path] = weight
    return weights


def mix(
    sources: Mapping[str, grain.MapDataset], weights: Mapping[str, float]
) -> grain.MapDataset:
    """Returns a dataset that takes turns with its sources, in proportion to weights.

    Which source an example is of depends on its number alone. The dataset ends with the
    first source that does.
    """
    total = sum(weights.values())
    if small := [path for path in weights if weights[path] < 1e-6 * total]:
        raise UserError(f"data.mixture: {small[0]} has a weight below a millionth")
    return grain.MapDataset.mix(
        [sources[path] for path in weights], [weights[path] for path in weights]
    )
