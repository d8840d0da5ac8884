"""A key of a config: its default, its type, its range, and what it means."""

import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_collections import FieldReference

from jshard.cli.paths import path_problem

_LARGEST: dict[Any, float] = {int: 2**31 - 1, float: 3.4e38}  # of int32 and float32
_NAMES = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    tuple: "names, like a,b",
    list: "names, like a,b",
}


class Key(FieldReference):
    """A value of a `ConfigDict` that also says what it means and what it may be.

    In a recipe's `get_config` it stands in the place of a plain value:

        "width": Key(128, "width of the residual stream", at_least=1)

    and is read and set like one: `config.model.width`. A plain value needs none of
    this; its type is then its only bound.

    Args:
      default: The value.
      help: What it means, on one line, for `--help`.
      kind: Its type, by default that of `default`. `Path` is a str that names a file
        or a folder.
      also: Values of other types that it may have, like None.
      choices: All values that it may have, beside those.
      at_least: The smallest value.
      above: What it must be larger than.
      at_most: The largest value; where a smallest is given this is by default what
        an int32 or a float32 holds.
      below: What it must be smaller than.
    """

    def __init__(
        self,
        default: Any,
        help: str,
        *,
        kind: type | None = None,
        also: Iterable[Any] = (),
        choices: Iterable[Any] = (),
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
    ):
        self.help = help
        self.kind = kind or type(default)
        self.also, self.choices = tuple(also), tuple(choices)
        self._bounds = [
            (f"{name} {bound}", holds, bound)
            for name, holds, bound in (
                ("at least", operator.ge, at_least),
                ("above", operator.gt, above),
                ("at most", operator.le, at_most),
                ("below", operator.lt, below),
            )
            if bound is not None
        ]
        self._capped = bool(self._bounds) and at_most is None and below is None
        self._finite = not (isinstance(default, float) and not math.isfinite(default))
        plain = str if self.kind is Path else self.kind
        super().__init__(default, field_type=object if self.also else plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of what was pickled."""
        self.__dict__.update(state)

    def is_special(self, value: Any) -> bool:
        """Whether a value is one of `also`."""
        return any(type(value) is type(one) and value == one for one in self.also)

    def is_type_of(self, value: Any) -> bool:
        """Whether a value has the type of this key; whole numbers are numbers, too."""
        if self.is_special(value):
            return True
        if isinstance(value, bool):
            return self.kind in (bool, object)
        if self.kind is float:
            return isinstance(value, int | float)
        if self.kind in (tuple, list):
            return isinstance(value, tuple | list)
        return isinstance(value, str if self.kind is Path else self.kind)

    def expected(self) -> str:
        """The type, in words."""
        if self.kind in (tuple, list) and (example := self.get()):
            return f"{self.kind.__name__} such as {example!r}"
        names = [_NAMES.get(self.kind, self.kind.__name__)]
        if self.kind is bool:
            names = ["true", "false"]
        return _either([*names, *map(str, self.also)])

    def limits(self) -> str:
        """What it may be, in words: "at least 0 and below 1"; empty for anything."""
        if self.choices:
            return _either([*map(str, self.also), *map(str, self.choices)])
        bounds = " and ".join(text for text, _, _ in self._bounds)
        if not self.also or not bounds:
            return bounds or (self.expected() if self.also else "")
        return f"{', '.join(map(str, self.also))}, or {bounds}"

    def problem(self, value: Any) -> str:
        """What is wrong with a value, as "must be at least 1"; empty where nothing is.

        Args:
          value: From a recipe or from a command line.
        """
        if self.is_special(value):
            return ""
        if not self.is_type_of(value) or not self.is_number(value):
            return f"must be {self.expected()}"
        if self.choices:
            return "" if value in self.choices else f"must be {self.limits()}"
        if not all(holds(value, bound) for _, holds, bound in self._bounds):
            return f"must be {self.limits()}"
        if self._capped and abs(value) > _LARGEST.get(self.kind, math.inf):
            return f"must be {self.limits()}, and at most {_LARGEST[self.kind]}"
        if self.kind is Path:
            return path_problem(value)
        return ""

    def is_number(self, value: Any) -> bool:
        """False for nan and infinities, unless such a value is the default."""
        return not (
            self._finite and isinstance(value, float) and not math.isfinite(value)
        )


def _either(words: list[str]) -> str:
    """Words as in "a, b or c"."""
    *some, last = words
    return f"{', '.join(some)} or {last}" if some else last
