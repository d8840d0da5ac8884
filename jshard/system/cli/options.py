"""The options of a command: declared once, read from its words, listed by `--help`."""

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jshard.system.cli.knob import Knob
from jshard.system.cli.other_libraries import counterpart
from jshard.system.cli.paths import is_remote, path_problem
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

_SHOWN: dict[Any, str] = {int: "N", float: "N", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option(Knob):
    """An option of a command. A default of None is for what may be left out."""

    required: bool = False
    repeats: bool = False  # whether it may be given several times; a tuple then
    bare: Any = None  # its value where none follows it; None if one must
    shown: str = ""  # what stands for a value in the help, like "DIR"

    def __post_init__(self):
        if self.default is not None and not self.repeats:
            super().__post_init__()
        if self.kind is bool:
            object.__setattr__(self, "bare", True)

    def label(self, name: str) -> str:
        """Returns how it is given: `PATH ...`, `--ema`, `--search[=KNOB,...]`."""
        if name.isupper():
            return f"{name} ..." if self.repeats else name
        value = self.shown or "|".join(self.choices) or _SHOWN.get(self.kind)
        value = value and (f"={value}" if self.bare is None else f"[={value}]")
        return f"--{name}{value or ''}"


# What the commands read that compute nothing.
CHECKPOINT = Option(
    None, "a run's folder, a folder of checkpoints, or one checkpoint", kind=Path,
    required=True, bucket=True,
)  # fmt: skip
STEP = Option(
    None, "which checkpoint of a run: the best by the run's checkpoint.best, the "
    "newest, or that of step N; RUN@best and RUN@N mean the same", kind=str,
    shown="best|newest|N",
)  # fmt: skip


def check_value(name: str, value: Any, knob: Knob, given: Any = None) -> None:
    """Raises a UserError if the value of an option, or of `config.KEY`, is impossible.

    `given` is what the user gave for it, if that is not the value itself.
    """
    problem = knob.problem(value)
    if not problem and knob.kind is Path and not knob.is_special(value):
        problem = path_problem(value, bucket=knob.bucket, hub=bool(knob.hub))
    if problem:
        raise UserError(f"--{name}={value if given is None else given}: {problem}")


def read_value(name: str, text: str, knob: Knob) -> Any:
    """Returns the value for a word of the command line; a UserError as above."""
    try:
        value = knob.read(text)
    except ValueError:
        raise UserError(f"--{name}={text}: must be {knob.possible()}") from None
    check_value(name, value, knob, text)
    return value


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line: `python -m jshard.NAME`, and what may follow."""

    name: str
    about: str  # what it does, in a sentence
    # By name. One in capitals is that of an argument without dashes, and `config.KEY`
    # stands for `--config.` with any key.
    options: Mapping[str, Option]
    notes: tuple[str, ...] = ()  # paragraphs at the end of the help

    def parse(self, words: Iterable[str]) -> SimpleNamespace:
        """Parses the words after the program's name.

        A value follows its option after `=` or as the next word.

        Returns:
          The options' values by name; Paths for paths, but not for URLs. `config.KEY`
          is `config_keys`, the text of each key: only the recipe knows their types.
          `help` is whether the recipe's keys are asked for, too; without a recipe,
          `--help` ends the process.

        Raises:
          UserError: An option is unknown, missing, or has no value or a bad one.
        """
        found: dict[str, Any] = {
            name: {} for name in self.options if name.endswith(".KEY")
        }
        wants_help, rest = False, iter(words)
        for word in rest:
            if word in ("--help", "-h"):
                wants_help = True
                continue
            name, label, text = self._split(word, found)
            option = self.options[name]
            if name.endswith(".KEY"):
                _, _, key = label.partition(".")
                found[name][key] = _text(label, text, rest, option)
                continue
            value = option.bare
            if text is not None or value is None:
                value = read_value(name, _text(label, text, rest, option), option)
                if option.kind is Path and not is_remote(value):
                    value = Path(value)
            found[name] = (*found.get(name, ()), value) if option.repeats else value
        if wants_help and not ("config" in found and "config.KEY" in found):
            show(self.help(), end="")
            sys.exit(0)
        for name, option in self.options.items():
            if option.required and name not in found and not wants_help:
                raise UserError(f"{option.label(name)} is missing; see --help")
            found.setdefault(name, option.default)
        values = {
            name.replace(".KEY", "_keys").replace("-", "_"): value
            for name, value in found.items()
        }
        return SimpleNamespace(**values, help=wants_help)

    def _split(self, word: str, found: Iterable[str]) -> tuple[str, str, str | None]:
        """Returns a word's option, how it is given, and the text after `=`."""
        if not word.startswith("-"):
            for name, option in self.options.items():
                if name.isupper() and (option.repeats or name not in found):
                    return name, name, word
        label, equals, text = word.partition("=")
        name, dot, key = label.removeprefix("--").partition(".")
        name = f"{name}.KEY" if key else f"{name}{dot}"
        if not label.startswith("--") or name not in self.options or name.isupper():
            names = [f"--{name}" for name in self.options if not name.isupper()]
            hint = did_you_mean(label, [*names, "--help"], cutoff=0.7)
            if "config.KEY" in self.options:
                hint = counterpart(label.lstrip("-"), "--config.") or hint
            if not hint and "config.KEY" in self.options and label.startswith("--"):
                hint = f"; keys of the recipe are --config.KEY: --config.{name}?"
            raise UserError(f"unknown argument {word!r}{hint}; see --help")
        return name, label, text if equals else None

    def help(self) -> str:
        """Returns what `--help` prints."""
        usage, rows = ["usage: python -m", f"jshard.{self.name}"], []
        for name, option in self.options.items():
            label, about = option.label(name), option.help
            if option.default not in (None, False, "", ()):
                about += f"; by default {option.default}"
            rows.append(explained(label, about))
            usage += [label] if option.required else []
        keys = "; with --config, the recipe's keys, too"
        about = f"this text{keys * ('config.KEY' in self.options)}"
        paragraphs = (
            " ".join([*usage, "[OPTIONS]"]),
            textwrap.fill(self.about, 88),
            "\n".join([*rows, explained("--help", about)]),
            *(textwrap.fill(note, 88, break_on_hyphens=False) for note in self.notes),
        )
        return "\n\n".join(paragraphs) + "\n"


def explained(label: str, about: str) -> str:
    """Returns lines of a help: an option or a key, and below it what it means."""
    lines = textwrap.wrap(about, 78, break_on_hyphens=False)
    return "\n".join([f"  {label}", *(f"{' ' * 10}{line}" for line in lines)])


def _text(label: str, text: str | None, rest: Iterator[str], option: Option) -> str:
    """Returns what follows an option: the text after `=`, or the next word."""
    following = next(rest, "") if text is None else ""
    value = text or (following if not following.startswith("--") else "")
    if not value and (text is None or option.kind is not str):
        raise UserError(f"{label} needs a value: {label}=...")
    return value
