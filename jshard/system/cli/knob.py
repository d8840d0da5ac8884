"""Knobs: the default, meaning and possible values of a setting, declared once.

`Policy` and `Precision` check their fields against them, the keys of a config and the
options of a command are knobs, and `--help` and docs/knobs.md list them.
"""

import ast
import dataclasses
import inspect
import math
import operator
import os
import textwrap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_LARGEST: dict[Any, float] = {int: 2**31 - 1, float: 3.4e38}  # of int32 and float32
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a path",
    tuple: "names, like a,b",
    list: "names, like a,b",
    object: "anything",
}


@dataclasses.dataclass(frozen=True)
class Knob:
    """A setting."""

    default: Any  # the value if none is given; always allowed
    help: str  # what the setting means, on one line
    _: dataclasses.KW_ONLY
    # The type of its values, by default that of `default`. `Path` means a str that
    # names a file or folder.
    kind: Any = None
    also: tuple[Any, ...] = ()  # allowed values of other types, like None
    # All allowed values besides `also`; empty for any value of `kind`.
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    # A bounded number without `at_most` and `below` must, in a config, fit an int32 or
    # a float32.
    at_most: float | None = None
    below: float | None = None
    # Which names on the Hugging Face Hub a `Path` may be instead: "model", "dataset" or
    # "stream".
    hub: str = ""
    mixture: bool = False  # whether there may be several, NAME:WEIGHT,NAME:WEIGHT
    noun: str = ""  # what a value of `kind` is, like "a number of layers"
    bucket: bool = False  # whether a path may be in a bucket: s3://BUCKET/PATH
    more: str = ""  # what it does and costs, in sentences, for its class's docstring

    def __post_init__(self):
        if self.kind is None:
            kind = object if self.default is None else type(self.default)
            object.__setattr__(self, "kind", kind)
        if self.default is None or not self.is_type_of(self.default):
            if not self.is_special(self.default):
                object.__setattr__(self, "also", (self.default, *self.also))

    @property
    def _bounds(self) -> list[tuple[str, Any, float]]:
        bounds = (
            ("at least", operator.ge, self.at_least),
            ("above", operator.gt, self.above),
            ("at most", operator.le, self.at_most),
            ("below", operator.lt, self.below),
        )
        return [(f"{name} {n}", holds, n) for name, holds, n in bounds if n is not None]

    def is_special(self, value: Any) -> bool:
        """Returns whether a value is one of `also`."""
        return any(type(value) is type(one) and value == one for one in self.also)

    def is_type_of(self, value: Any) -> bool:
        """Returns whether a value has this knob's type; ints count as floats."""
        if self.is_special(value):
            return True
        if isinstance(value, bool):
            return self.kind in (bool, object)
        types = {float: int | float, tuple: tuple | list, list: tuple | list, Path: str}
        return isinstance(value, types.get(self.kind, self.kind))

    def allows(self, value: Any) -> bool:
        """Returns whether a value is possible."""
        if self.is_special(value):
            return True
        # nan and infinities are possible if the default is one of them.
        finite = _is_finite(value) or not _is_finite(self.default)
        if not self.is_type_of(value) or not finite:
            return False
        if self.choices:
            return value in self.choices
        return all(holds(value, bound) for _, holds, bound in self._bounds)

    def possible(self) -> str:
        """Returns the possible values as text: "None or a number of layers, ..."."""
        special = [str(value) for value in self.also]
        if self.choices:
            return _either([*special, *map(str, self.choices)])
        if self.kind is bool:
            nouns = ["True", "False"]
        elif self.kind in (tuple, list) and self.default:
            nouns = [f"{self.kind.__name__} such as {self.default!r}"]
        else:
            nouns = [self.noun or _NAMES.get(self.kind) or self.kind.__name__]
        bounds = " and ".join(text for text, _, _ in self._bounds)
        return ", ".join(filter(None, (_either([*special, *nouns]), bounds)))

    def problem(self, value: Any) -> str:
        """Returns what is wrong with a config's value: "must be ..."; "" if nothing."""
        if not self.allows(value):
            return f"must be {self.possible()}"
        open_ended = self.at_most is None and self.below is None
        if self._bounds and open_ended and not self.is_special(value):
            if abs(value) > (most := _LARGEST.get(self.kind, math.inf)):
                return f"must be {self.possible()} and at most {most}"
        return ""

    def read(self, text: str) -> Any:
        """Converts a word of the command line to a value, which may be out of range.

        A sequence takes elements of the types of the default's; names also as a,b.

        Raises:
          ValueError: It is no value of this type.
        """
        for value in self.also:
            if text == str(value) or (
                isinstance(value, bool) and text == str(value).lower()
            ):
                return value
        if self.kind in (int, float):
            return self.kind(text)
        if self.kind is bool:
            return _read_bool(text)
        if self.kind in (tuple, list):
            return self.kind(_read_sequence(text, self.default or ()))
        for read in (int, float, _read_bool) if self.kind is object else ():
            try:
                return read(text)
            except ValueError:
                pass
        return text

    def cast(self, value: Any) -> Any:
        """Returns a value in the form of this knob's type: 1 as 1.0, for example.

        A list becomes a tuple, a `Path` text, and a NumPy scalar Python's. What has
        another type stays as it is, for `problem` to refuse.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if self.is_special(value):
            return value
        if self.kind is float and type(value) is int:
            return float(value)
        if self.kind in (tuple, list) and isinstance(value, tuple | list):
            return self.kind(value)
        if self.kind is Path and isinstance(value, os.PathLike):
            return os.fspath(value)
        return value


def knob(default: Any, help: str, **limits: Any) -> Any:
    """Declares a dataclass field that is a knob, with the arguments of `Knob`."""
    declared = Knob(default, help, **limits)
    return dataclasses.field(default=default, metadata={Knob: declared})


def knobs(cls: Any, prefix: str = "") -> dict[str, Knob]:
    """Returns the knobs of a dataclass and of nested ones, by dotted name."""
    found: dict[str, Knob] = {}
    for field in dataclasses.fields(cls):
        if Knob in field.metadata:
            found[prefix + field.name] = field.metadata[Knob]
        elif dataclasses.is_dataclass(field.default):
            found |= knobs(field.default, f"{prefix}{field.name}.")
    return found


def described(cls: type[T]) -> type[T]:
    """Adds the knobs of a dataclass to its docstring, as attributes."""
    text = [inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:"]
    for name, declared in knobs(cls).items():
        default = declared.default if declared.default != () else "none"
        entry = f"{name}: {declared.help}. {declared.more}".strip()
        entry += f" Possible: {declared.possible()}. Default: {default}."
        text += textwrap.wrap(
            entry,
            80,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    cls.__doc__ = "\n".join(text)
    return cls


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _read_sequence(text: str, default: tuple | list) -> list[Any]:
    kinds = {type(value) for value in default}
    try:
        literal = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        if kinds <= {str} and not set(text) & set("()[]{}'\""):
            return [name for name in map(str.strip, text.split(",")) if name]
        raise ValueError(text) from error
    values = list(literal) if isinstance(literal, tuple | list) else [literal]
    if float in kinds and kinds <= {int, float}:
        values = [float(v) if type(v) is int else v for v in values]
        kinds = {float}
    if any(type(value) not in (kinds or {int, float, bool, str}) for value in values):
        raise ValueError(text)
    return values


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _either(words: list[str]) -> str:
    """Joins words as in "a, b or c"."""
    *some, last = words
    return f"{', '.join(some)} or {last}" if some else last
