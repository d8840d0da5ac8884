"""Sets keys of a config, by values or by words of the command line, and lists them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.run_config import declarations, flatten
from jshard.recipe.config.shared_keys import DEFAULTS, REQUIRED, SHARED
from jshard.system.cli.knob import Knob
from jshard.system.cli.options import check_value, explained, read_value
from jshard.system.cli.other_libraries import counterpart
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean


def override(config: ConfigDict, values: Mapping[str, Any], recipe: str) -> None:
    """Sets keys of a complete config in place, to values by dotted key.

    `recipe` is the recipe's name, for messages.

    Raises:
      UserError: A key is unknown, or a value impossible.
    """
    declared, found = declarations(config), {}
    for key, value in values.items():
        knob = _declaration(f"config.{key}", declared, recipe)
        found[key] = knob.cast(value)
        check_value(f"config.{key}", found[key], knob)
    with config.ignore_type():  # the declared type may differ from the default's
        config.update_from_flattened_dict(found)


def with_values(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy of a config with other values, which are not checked."""
    changed = config.copy_and_resolve_references()
    with changed.ignore_type():
        changed.update_from_flattened_dict(dict(values))
    return changed


def read_words(
    config: ConfigDict, words: Mapping[str, str], recipe: str, option: str = "config"
) -> dict[str, Any]:
    """Converts words of the command line, by dotted key, to values for `override`.

    `recipe` and `option`, which has the keys, are for messages.

    Raises:
      UserError: A key is unknown, or a value impossible.
    """
    declared = declarations(config)
    return {
        key: read_value(name, text, _declaration(name, declared, recipe))
        for key, text in words.items()
        if (name := f"{option}.{key}")
    }


def _declaration(name: str, declared: Mapping[str, Knob], recipe: str) -> Knob:
    """Returns the declaration of a key that was given as `config.KEY`."""
    option, _, key = name.partition(".")
    if key in declared:
        return declared[key]
    members = [name for name in declared if name.startswith(f"{key}.")]
    hint = f"; it is a group: {', '.join(members)}" if members else ""
    group, _, last = key.rpartition(".")
    beside = [x.rpartition(".")[2] for x in declared if x.rpartition(".")[0] == group]
    if group and beside and not members and not did_you_mean(last, beside):
        hint = f"; {group} has {', '.join(beside)}"
    if not members:
        hint = counterpart(key, f"--{option}.", declared) or hint
    raise UserError(
        f"unknown key --{name} in recipe {recipe}"
        f"{hint or did_you_mean(key, declared)}; --help lists all keys"
    )


def keys_help(config: ConfigDict, recipe: str) -> str:
    """Lists the keys of a config with default, meaning and limits.

    The recipe's own groups come first.
    """
    values, declared = flatten(config), declarations(config)
    own = [key for key in values if key not in SHARED]
    groups: dict[str, list[str]] = {"": []}
    for key in (*REQUIRED, *own, *DEFAULTS):
        group, dot, _ = key.partition(".")
        groups.setdefault(group if dot else "", []).append(key)
    lines = [f"keys of {recipe}, with their defaults:"]
    for members in groups.values():
        lines.append("")
        for key in members:
            knob = declared[key]
            about = f"{knob.help} ({knob.possible()})" if knob.help else ""
            lines.append(explained(f"--config.{key}={values[key]}", about))
    return "\n".join(lines) + "\n"
