"""The command line: the recipe, the command's options, and overrides of the config."""

import ast
import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jshard.cli.paths import path_problem
from jshard.config.run_config import Config, declarations, flatten, nearest
from jshard.config.shared_keys import DEFAULTS, REQUIRED, SHARED
from jshard.distributed import cluster
from jshard.errors import UserError
from jshard.knob import Knob

USAGE = """\
usage: python -m jshard.train --config=FILE [--config.KEY=VALUE ...] [--workdir=DIR]

Trains the model of a recipe, fully sharded over all devices.

  --config=FILE       the recipe: a path, a file in ./train/, or a packaged recipe
  --config.KEY=VALUE  sets one of the recipe's keys, e.g. --config.steps=100
  --workdir=DIR       the run's folder; by default runs/RECIPE-DATE-TIME
  --help              this text, and the keys of the recipe if --config is given

Several processes train together if SLURM, Open MPI or Kubernetes started them, or if
each is started with the same command (docs/cluster; python -m jshard.launch does that):

  --coordinator=HOST:PORT  the host of process 0, and a free port there
  --num_processes=N        the number of processes
  --process_id=I           the number of this process, from 0
  --local_device_ids=0,1   the GPUs of this process; by default all that it sees
"""
_PATHS = ("config", "workdir", "constants", "json", "html", "trace", "hlo")


@dataclasses.dataclass
class Arguments:
    """A parsed command line.

    Attributes:
      recipe: The value of `--config`.
      options: The values of the command's own options, like "workdir", by name.
      overrides: The text given for each key of the config, in order.
      help: Whether `--help` is given.
    """

    recipe: str | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    help: bool = False


def parse_arguments(
    argv: Iterable[str], options: Iterable[str] = ("workdir", *cluster.OPTIONS)
) -> Arguments:
    """Parses a command line; keys and values of the config are not checked yet.

    Args:
      argv: The words after the program's name. A value follows its option after `=` or
        as the next word.
      options: Names of the command's own options; those of training by default.

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
        is_key = option.startswith("--config.")
        if option not in ("--config", *own) and not is_key:
            hint = nearest(option, ("--config", *own, "--help"))
            raise UserError(f"unknown argument {word!r}{hint}; see --help")
        value = value if equals else next(words, "")
        if not value and not (equals and is_key):
            raise UserError(f"{option} needs a value: {option}=...")
        if option.removeprefix("--") in _PATHS and (problem := path_problem(value)):
            raise UserError(f"{option}={value}: {problem}")
        if is_key:
            arguments.overrides[option.removeprefix("--config.")] = value
        elif option == "--config":
            arguments.recipe = value
        else:
            arguments.options[own[option]] = value
    return arguments


def override(config: Config, overrides: dict[str, str], recipe: str) -> None:
    """Sets keys of a config in place, from text by dotted key.

    `recipe` is the recipe's name, for messages.

    Raises:
      UserError: A key is unknown, or a value is not of its key's type.
    """
    keys, declared = flatten(config), declarations(config)
    for key, text in overrides.items():
        if key not in keys:
            members = [name for name in keys if name.startswith(f"{key}.")]
            hint = f"; it is a group: {', '.join(members)}" if members else ""
            raise UserError(
                f"unknown key --config.{key} in recipe {recipe}"
                f"{hint or nearest(key, keys)}; --help lists all keys"
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
        with group.ignore_type():  # the declared type may differ from the default's
            group[name] = value


def _parse(text: str, key: Knob, default: Any) -> Any:
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
    """Parses a value, by the type of the default that it replaces.

    A default of None takes any number, boolean or name. A sequence takes elements of
    the types of its own, and names also as a,b. `None` gives None for names and for a
    default of None.

    Args:
      text: What the user gave.
      default: The value to replace.
      kind: The type, if it is not that of the default.

    Raises:
      ValueError: The text is not of that type.
    """
    kind = kind or type(default)
    if text == "None" and (default is None or kind is str):
        return None
    if kind is bool:
        return _parse_bool(text)
    if kind in (str, int, float):
        return kind(text)
    if kind in (tuple, list):
        return kind(_parse_sequence(text, default or ()))
    for parse in (int, float, _parse_bool):
        try:
            return parse(text)
        except ValueError:
            pass
    return text


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


def help_text(
    config: Config | None = None, recipe: str = "", usage: str = USAGE
) -> str:
    """Returns the usage, followed by the keys of a recipe's config if one is given.

    Keys come with default, meaning and limits, and the recipe's own groups come first.
    """
    if config is None:
        return usage
    keys, declared = flatten(config), declarations(config)
    own = [key for key in keys if key not in SHARED]
    groups: dict[str, list[str]] = {"": []}
    for key in (*REQUIRED, *own, *DEFAULTS):
        group, dot, _ = key.partition(".")
        groups.setdefault(group if dot else "", []).append(key)
    lines = [usage, f"keys of {recipe}, with their defaults:"]
    for members in groups.values():
        lines.append("")
        for key in members:
            lines.append(f"  --config.{key}={keys[key]}")
            if about := declared[key].help:
                about = f"{about} ({declared[key].possible()})"
                lines.append(textwrap.indent(textwrap.fill(about, 78), " " * 10))
    return "\n".join(lines) + "\n"
