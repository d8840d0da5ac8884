"""A user's prices of GPUs: a TOML file. jshard has none of its own, which would age."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jshard.plan.fit.toml_file import read_toml
from jshard.system.errors import UserError

_UNIT = "per_gpu_hour"
_TEXTS = ("currency", "source", "date")


class Prices(NamedTuple):
    """What a GPU costs for an hour, by the name that `--topologies` has of it."""

    per_gpu_hour: Mapping[str, float]
    currency: str = ""
    source: str = ""  # where they are from, and of which day

    def of(self, topology: str) -> float | None:
        """Returns the price of a GPU of "h100:64" for an hour, if there is one."""
        return self.per_gpu_hour.get(topology.rpartition(":")[0].lower())


def read_prices(path: Path) -> Prices:
    """Reads prices.

    Raises:
      UserError: The file cannot be read, or a price has no unit or is none.
    """
    found = read_toml("--prices", path)
    prices: Any = found.pop(_UNIT, None)
    for key, value in found.items():
        if key not in _TEXTS:
            raise UserError(
                f"--prices={path}: {key!r} has no unit: a price stands under "
                f"[{_UNIT}]; beside it may be {', '.join(_TEXTS)}"
            )
        if key != "date" and not isinstance(value, str):
            raise UserError(f"--prices={path}: {key} = {value!r} must be a text")
    if not isinstance(prices, dict) or not prices:
        raise UserError(
            f"--prices={path}: has no table [{_UNIT}] with a line like h100 = 2.50"
        )
    for name, price in prices.items():
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not number or not 0 < price < math.inf:
            raise UserError(
                f"--prices={path}: {name} = {price!r} must be a number above 0, per "
                "GPU and hour"
            )
    source = ", ".join(str(found[key]) for key in ("source", "date") if key in found)
    by_name = {name.lower(): float(price) for name, price in prices.items()}
    return Prices(by_name, found.get("currency", ""), source or str(path))
