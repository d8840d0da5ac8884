"""The options of a command: declared once, read from its words, listed by `--help`."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jshard.cli.paths import path_problem
from jshard.cli.terminal import show
from jshard.errors import UserError
from jshard.formatting import did_you_mean
from jshard.knob import Knob

_WIDTH, _COLUMN = 88, 24  # of the help, and where it explains
_SHOWN: dict[Any, str] = {int: "N", float: "N", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Option(Knob):
    """An option of a command. A default of None is for what may be left out.

    Attributes:
      required: Whether it must be given.
      repeats: Whether it may be given several times; its value is a tuple.
      bare: Its value where none follows it; None if one must.
      shown: What stands for a value in the help, like "DIR".
    """

    _: dataclasses.KW_ONLY
    required: bool = False
    repeats: bool = False
    bare: Any = None
    shown: str = ""

    def __post_init__(self):
        if self.default is not None and not self.repeats:
            super().__post_init__()
        if self.kind is bool:
            object.__setattr__(self, "bare", True)

    def label(self, name: str) -> str:
        """Returns how it is given: `PATH`, `--ema`, `--search[=KNOB,...]`."""
        if name.isupper():
            return f"{name} ..." if self.repeats else name
        if self.kind is bool:
            return f"--{name}"
        value = self.shown or "|".join(self.choices) or _SHOWN[self.kind]
        return f"--{name}={value}" if self.bare is None else f"--{name}[={value}]"

    def meaning(self) -> str:
        """Returns the help, with the default if it says something."""
        if self.default in (None, False, "", ()):
            return self.help
        return f"{self.help}; by default {self.default}"


def check_value(name: str, value: Any, knob: Knob, given: Any = None) -> None:
    """Checks a value: that of an option, or of a key as `config.KEY`.

    Args:
      name: What has the value, without dashes.
      value: The value, cast to the knob's type.
      knob: The declaration.
      given: What the user gave, if that is not the value.

    Raises:
      UserError: The value is impossible.
    """
    problem = knob.problem(value)
    if not problem and knob.kind is Path and not knob.is_special(value):
        problem = path_problem(value)
    if problem:
        raise UserError(f"--{name}={value if given is None else given}: {problem}")


def read_value(name: str, text: str, knob: Knob) -> Any:
    """Converts a word of the command line to a value, once, and checks that.

    Raises:
      UserError: The value is impossible.
    """
    try:
        value = knob.read(text)
    except ValueError:
        raise UserError(f"--{name}={text}: must be {knob.possible()}") from None
    check_value(name, value, knob, text)
    return value


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line: `python -m jshard.NAME`, and what may follow.

    Attributes:
      name: The command's name.
      about: What it does, in a sentence.
      options: Its options by name. A name in capitals is that of an argument without
        dashes, and `config.KEY` stands for `--config.` with any key.
      notes: Paragraphs at the end of the help.
    """

    name: str
    about: str
    options: Mapping[str, Option]
    notes: tuple[str, ...] = ()

    def parse(self, words: Iterable[str]) -> SimpleNamespace:
        """Parses the words after the program's name.

        A value follows its option after `=` or as the next word.

        Returns:
          The options' values by name; Paths for paths. `config.KEY` is `config_keys`,
          the text of each key: only the recipe knows their types. `help` is whether the
          recipe's keys are asked for, too; without a recipe, `--help` ends the process.

        Raises:
          UserError: An option is unknown, missing, or has no value or a bad one.
        """
        found: dict[str, Any] = {}
        families: dict[str, dict[str, str]] = {
            name: {} for name in self.options if name.endswith(".KEY")
        }
        wants_help = False
        rest = iter(words)
        for word in rest:
            if word in ("--help", "-h"):
                wants_help = True
                continue
            name, key, text = self._split(word, found)
            if key:
                label = f"--{name}.{key}"
                families[f"{name}.KEY"][key] = _text(label, text, rest, empty=True)
                continue
            option = self.options[name]
            value = option.bare
            if text is not None or value is None:
                label = name if name.isupper() else f"--{name}"
                text = _text(label, text, rest, empty=option.kind is str)
                value = read_value(name, text, option)
                value = Path(value) if option.kind is Path else value
            found[name] = (*found.get(name, ()), value) if option.repeats else value
        if wants_help and not ("config.KEY" in families and "config" in found):
            show(self.help(), end="")
            sys.exit(0)
        for name, option in self.options.items():
            if option.required and name not in found and not wants_help:
                raise UserError(f"{option.label(name)} is missing; see --help")
            found.setdefault(name, option.default)
        found |= {name.replace(".KEY", "_keys"): x for name, x in families.items()}
        return SimpleNamespace(**found, help=wants_help)

    def _split(self, word: str, found: Iterable[str]) -> tuple[str, str, str | None]:
        """Returns an option's name, its key if any, and its value if `=` is in it."""
        if not word.startswith("-"):
            for name, option in self.options.items():
                if name.isupper() and (option.repeats or name not in found):
                    return name, "", word
        label, equals, text = word.partition("=")
        name, dot, key = label.removeprefix("--").partition(".")
        known = f"{name}.KEY" if key else f"{name}{dot}"
        if not label.startswith("--") or known not in self.options or name.isupper():
            names = [f"--{name}" for name in self.options if not name.isupper()]
            hint = did_you_mean(label, [*names, "--help"])
            raise UserError(f"unknown argument {word!r}{hint}; see --help")
        return name, key, text if equals else None

    def help(self) -> str:
        """Returns what `--help` prints."""
        usage = [f"usage: python -m jshard.{self.name}"]
        rows = []
        for name, option in self.options.items():
            label = option.label(name)
            rows.append(_row(label, option.meaning()))
            label += " ..." if name.endswith(".KEY") else ""
            usage.append(label if option.required else f"[{label}]")
        rows.append(_row("--help", "this text; with --config, the recipe's keys, too"
                         if "config.KEY" in self.options else "this text"))  # fmt: skip
        paragraphs = [
            _fill(" ".join(usage), " " * 6),
            _fill(self.about),
            "\n".join(rows),
            *map(_fill, self.notes),
        ]
        return "\n\n".join(paragraphs) + "\n"


def _text(label: str, text: str | None, rest: Iterator[str], *, empty: bool) -> str:
    """Returns what follows an option: the text after `=`, or the next word."""
    if text is None:
        text, empty = next(rest, ""), False
        text = "" if text.startswith("--") else text
    if not text and not empty:
        raise UserError(f"{label} needs a value: {label}=...")
    return text


def _row(label: str, text: str) -> str:
    indent = " " * _COLUMN
    if len(label) + 4 > _COLUMN:
        return f"  {label}\n{indent}{_fill(text, indent)}"
    return f"  {label:<{_COLUMN - 2}}{_fill(text, indent)}"


def _fill(text: str, indent: str = "") -> str:
    """Wraps text; what follows the first line is indented."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ).lstrip()
