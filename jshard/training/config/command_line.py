"""The command line: what was asked for, as a recipe file and a config."""

import ast
import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jshard.cli.paths import path_problem
from jshard.distributed import cluster
from jshard.errors import UserError
from jshard.knob import Knob
from jshard.training.config.config import Config, declarations, flatten, nearest
from jshard.training.config.shared_keys import DEFAULTS, REQUIRED, SHARED

USAGE = """\
usage: python -m jshard.train --config=FILE [--config.KEY=VALUE ...] [--workdir=DIR]

Trains the model of a recipe, fully sharded over all devices.

  --config=FILE       the recipe: a path, a file in ./train/, or a packaged recipe
  --config.KEY=VALUE  sets one of the recipe's keys, e.g. --config.steps=100
  --workdir=DIR       the run's folder; by default runs/RECIPE-DATE-TIME
  --help              this text, and the keys of the recipe when --config is given

Several processes train together where SLURM, Open MPI or Kubernetes started them, or by
hand, the same command for each (docs/cluster; python -m jshard.launch starts them):

  --coordinator=HOST:PORT  where process 0 runs, and a free port there
  --num_processes=N        how many there are
  --process_id=I           which one this is, from 0
  --local_device_ids=0,1   its GPUs; by default all that it sees
"""
_PATHS = (
    "--config",
    "--workdir",
    "--constants",
    "--json",
    "--html",
    "--trace",
    "--hlo",
)
_INDENTED: Any = {"initial_indent": " " * 10, "subsequent_indent": " " * 10}


@dataclasses.dataclass
class Arguments:
    """What the command line says, before any recipe is read.

    Attributes:
      recipe: The value of `--config`.
      options: The values of the command's own options, like "workdir", by name.
      overrides: The text given for each key, in order.
      help: Whether `--help` is there.
    """

    recipe: str | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    help: bool = False


def parse_arguments(
    argv: Iterable[str], options: Iterable[str] = ("workdir", *cluster.OPTIONS)
) -> Arguments:
    """Reads the command line's words.

    Args:
      argv: The words after the program's name. A value follows its option after `=` or
        as the next word.
      options: Names of the command's own options; those of training by default.

    Returns:
      The arguments; keys and values are not checked yet.

    Raises:
      UserError: An option is unknown or has no value.
    """
    arguments = Arguments()
    own = {f"--{name}": name for name in options}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--help", "-h"):
            arguments.help = True
            continue
        if option not in ("--config", *own) and not option.startswith("--config."):
            hint = nearest(option, ("--config", *own, "--help"))
            raise UserError(f"unknown argument {word!r}{hint}; see --help")
        value = value if equals else next(words, "")
        if not value and not (equals and option.startswith("--config.")):
            raise UserError(f"{option} needs a value: {option}=...")
        if option in _PATHS and (problem := path_problem(value)):
            raise UserError(f"{option}={value}: {problem}")
        if option == "--config":
            arguments.recipe = value
        elif option in own:
            arguments.options[own[option]] = value
        else:
            arguments.overrides[option.removeprefix("--config.")] = value
    return arguments


def override(config: Config, overrides: dict[str, str], recipe: str) -> None:
    """Sets keys of the config from text, each by the type of its default.

    Args:
      config: Changed in place.
      overrides: Text by dotted key.
      recipe: The recipe's name, for messages.

    Raises:
      UserError: A key is unknown, or a value is not of its key's type.
    """
    keys, declared = flatten(config), declarations(config)
    for key, text in overrides.items():
        if key not in keys:
            members = [name for name in keys if name.startswith(f"{key}.")]
            hint = nearest(key, keys)
            if members:
                hint = f"; it is a group: {', '.join(members)}"
            raise UserError(
                f"unknown key --config.{key} in recipe {recipe}{hint}; "
                "--help lists all keys"
            )
        *groups, name = key.split(".")
        group = config
        for part in groups:
            group = group[part]
        try:
            value = _parse(text, declared[key], keys[key])
        except ValueError:
            raise UserError(
                f"--config.{key}={text}: expected {declared[key].possible()} "
                f"(the default is {keys[key]!r})"
            ) from None
        with group.ignore_type():  # it is of the declared type, not of the default's
            group[name] = value


def _parse(text: str, key: Knob, default: Any) -> Any:
    """Reads the value of a key.

    Raises:
      ValueError: The text is not of its type.
    """
    for value in key.also:
        if text == str(value) or (
            isinstance(value, bool) and text == str(value).lower()
        ):
            return value
    kind = {Path: str, object: None}.get(key.kind, key.kind)
    value = parse_value(text, default, kind)
    if not key.is_type_of(value) or not key.is_number(value):
        raise ValueError(text)
    return value


def parse_value(text: str, default: Any, kind: type | None = None) -> Any:
    """Reads a value from text, by the type of the default it replaces.

    Args:
      text: What the user gave.
      default: The value that it replaces. A default of None takes any number, boolean
        or name; a sequence takes elements like its own, and names also as a,b.
      kind: The type, where the default is the None of a typed placeholder.

    Returns:
      The value. The text `None` gives None for names and placeholders.

    Raises:
      ValueError: The text is not of that type.
    """
    kind = kind or type(default)
    if text == "None" and (default is None or kind is str):
        return None
    if kind is str:
        return text
    if kind is bool:
        return _parse_bool(text)
    if kind in (int, float):
        return kind(text)
    if kind in (tuple, list):
        return kind(_parse_sequence(text, default or ()))
    return _parse_untyped(text)


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _parse_sequence(text: str, default: Iterable[Any]) -> list[Any]:
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


def _parse_untyped(text: str) -> Any:
    for parse in (int, float, _parse_bool):
        try:
            return parse(text)
        except ValueError:
            pass
    return text


def help_text(
    config: Config | None = None, recipe: str = "", usage: str = USAGE
) -> str:
    """Returns the usage, with a recipe's keys and defaults when one is given."""
    if config is None:
        return usage
    return f"{usage}\nkeys of {recipe}, with their defaults:\n{_describe(config)}"


def _describe(config: Config) -> str:
    """Every key, its default, meaning and limits; the recipe's own groups first."""
    keys, declared = flatten(config), declarations(config)
    own = [key for key in keys if key not in SHARED]
    groups: dict[str, list[str]] = {"": []}
    for key in (*REQUIRED, *own, *DEFAULTS):
        group, dot, _ = key.partition(".")
        groups.setdefault(group if dot else "", []).append(key)
    lines = []
    for members in groups.values():
        lines.append("")
        for key in members:
            lines.append(f"  --config.{key}={keys[key]}")
            if about := declared[key].help:
                about = f"{about} ({declared[key].possible()})"
                lines.append(textwrap.fill(about, 88, **_INDENTED))
    return "\n".join(lines) + "\n"
