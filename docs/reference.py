"""Writes the generated pages of docs/reference, and finds what the others leave out.

    python docs/reference.py

writes `commands.md` from each command's `--help`, and `knobs.md` and `recipe_keys.md`
from the declarations of config keys. The functions below name what a user can see; a
test compares them with the pages.
"""

import ast
import contextlib
import importlib
import io
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jshard
from jshard.recipe.config.run_config import complete, declarations, flatten
from jshard.recipe.config.shared_keys import REQUIRED, SHARED
from jshard.recipe.load import find_recipe, open_recipe
from jshard.system.cli.commands import COMMANDS
from jshard.system.cli.knob import Knob

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "reference"
RECIPES = (
    "gpt.py", "gpt2_124m.py", "llama.py:3-8b", "finetune.py", "preference.py",
    "bert.py", "t5.py", "digits.py", "imagenet_regnet.py",
)  # fmt: skip
# What users' code imports from, apart from the pages' own blocks.
IMPORTING = ("models/*.py", "train/*.py", "examples/*.py")

COMMANDS_HEAD = """\
<!-- written by docs/reference.py -->

# Commands

Each is a program, `jshard-NAME`, and a module, `python -m jshard.NAME`. An option that
several commands share is explained under the first. [Exit codes](exit_codes.md) have a
page.
"""
KNOBS_HEAD = """\
<!-- written by docs/reference.py -->

# Config keys of every recipe

Set them with `--config.KEY=VALUE`, or in a recipe's `get_config`. The `policy` keys are
the fields of `jshard.Policy`. `python -m jshard.train --config=FILE --help` also lists
the recipe's own keys.
"""
KEYS_HEAD = """\
<!-- written by docs/reference.py -->

# Keys of the packaged recipes

Set them with `--config.KEY=VALUE`, like [the keys of every recipe](../knobs.md).
Llama's defaults are those of `llama.py:3-8b`.
"""


def commands_page() -> str:
    """The page of all commands, as Markdown, which explains an option once."""
    page = COMMANDS_HEAD
    explained: dict[str, str] = {}  # the command under which an option is explained
    for name, what in COMMANDS.items():
        printed = help_of(name).strip() + "\n"
        shared: dict[str, list[str]] = {}
        for entry in re.findall(r"^  --.*\n(?: {10}.*\n)+", printed, re.MULTILINE):
            first = explained.setdefault(entry, name)
            if first != name and "--help" not in entry:
                shared.setdefault(first, []).append(entry.split()[0])
                printed = printed.replace(entry, "")
        page += f"\n## {name}\n\n`python -m jshard.{name}` {what}.\n\n"
        page += f"```text\n{printed}```\n"
        for first, options in shared.items():
            page += f"\nAs for {first}: `{'`, `'.join(options)}`.\n"
    return page


def help_of(command: str) -> str:
    """What `python -m jshard.COMMAND --help` prints."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, main = scripts["scripts"][f"jshard-{command}"].partition(":")
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="88", NO_COLOR="1"),
        mock.patch.object(sys, "argv", [f"jshard-{command}", "--help"]),
        mock.patch.object(warnings, "formatwarning"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        getattr(importlib.import_module(module), main)()
    return printed.getvalue()


def options_of(text: str) -> set[str]:
    """The options that a help text, or a section of the page, names."""
    return set(re.findall(r"(?<![\w.-])--[a-z_]+", text))


def knobs_page() -> str:
    """The page of the keys that every recipe has, as Markdown."""
    page, above = KNOBS_HEAD, None
    for key, knob in SHARED.items():
        section = key.partition(".")[0] if "." in key else "The run"
        if section != above:
            page += f"\n## {section}\n\n"
        default = "none, required" if key in REQUIRED else f"`{knob.default!r}`"
        page += _entry(key, knob.help, _values(knob), default)
        above = section
    return page


def keys_page() -> str:
    """The page of the packaged recipes' own keys, as Markdown.

    Keys are grouped by section, and within it by the recipes that have them.
    """
    defaults: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in RECIPES:
        with open_recipe(find_recipe(name)) as recipe:
            config = complete(recipe.get_config(), recipe.name)
        values, declared = flatten(config), declarations(config)
        for key in sorted(values.keys() - SHARED.keys()):
            meaning = (key, declared[key].help, _values(declared[key]))
            in_recipes = defaults.setdefault(meaning, {})
            in_recipes[name.partition(".")[0]] = f"`{values[key]!r}`"
    sections: dict[str, dict[str, str]] = {}
    widest_first = sorted(defaults, key=lambda meaning: -len(defaults[meaning]))
    for meaning in sorted(
        widest_first, key=lambda meaning: meaning[0].partition(".")[0]
    ):
        recipes = ", ".join(defaults[meaning])
        groups = sections.setdefault(meaning[0].partition(".")[0], {})
        entry = _entry(*meaning, _defaults(defaults[meaning]))
        groups[recipes] = groups.get(recipes, "") + entry
    page = KEYS_HEAD
    for section, groups in sections.items():
        page += f"\n## {section}\n"
        for recipes, entries in groups.items():
            page += f"\nIn {recipes}:\n\n{entries}"
    return page


def _values(knob: Knob) -> str:
    """The possible values, less what the default shows."""
    possible = knob.possible()
    if possible in ("True or False", "text", "a path"):
        return ""
    if knob.is_special(knob.default):
        possible = re.sub(f"^{re.escape(str(knob.default))}(, | or )", "", possible)
    possible = re.sub("a (whole|finite) number, ", "", possible)
    possible = re.sub("at least ([^ ]+) and at most ", r"\1 to ", possible)
    possible = re.sub("at least ", "≥ ", possible)
    return re.sub("above ", "> ", re.sub("(^| and )below ", ", < ", possible))


def _defaults(in_recipes: dict[str, str]) -> str:
    """The default of all recipes, or each one's."""
    recipes: dict[str, list[str]] = {}
    for name, value in in_recipes.items():
        recipes.setdefault(value, []).append(name)
    if len(recipes) == 1:
        return next(iter(recipes))
    return ", ".join(
        f"{value} ({', '.join(names)})" for value, names in recipes.items()
    )


def _entry(key: str, help: str, values: str, default: str) -> str:
    """A key as an item of a list, which phones can show, unlike a wide table."""
    possible = f"; {values}" if values else ""
    return f"- `{key}`: {help}. Default: {default}{possible}.\n"


def public_names(pages: dict[Path, str]) -> set[str]:
    """What users import: names of jshard, and what models, recipes, examples need."""
    others = {"__version__", *vars(jshard)["_MODULES"]}  # whose names have pages
    names = {f"jshard.{name}" for name in {*dir(jshard)} - others}
    files = [path for pattern in IMPORTING for path in REPOSITORY.glob(pattern)]
    sources = [path.read_text() for path in files]
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    sources += [block for text in pages.values() for block in blocks.findall(text)]
    return names.union(*map(_imported, sources))


def _imported(source: str) -> set[str]:
    """Names that a program imports from jshard, but for packaged models and recipes."""
    own = ("jshard.models", "jshard.recipes")  # docs/reference/models.md describes them
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith("jshard.") and not node.module.startswith(own)
        for alias in node.names
    }


def documented_names(pages: dict[Path, str]) -> set[str]:
    """The names, and all that a documented module defines, in the API's directives."""
    found = re.findall(
        r"^\.\. auto(\w+):: (\S+)$", "\n".join(pages.values()), re.MULTILINE
    )
    names = {name for _, name in found}
    for kind, name in found:
        if kind == "module":
            module = importlib.import_module(name)
            names |= {f"{name}.{public}" for public in vars(module) if public[0] != "_"}
    return names


def exit_codes() -> set[int]:
    """Every exit code that a command's docstring or `expected_ending` has."""
    codes = set()
    for path in sorted((REPOSITORY / "jshard").rglob("*.py")):
        codes |= set(_codes(ast.parse(path.read_text())))
    return codes


def _codes(module: ast.Module) -> Iterator[int]:
    _, heading, listed = (ast.get_docstring(module) or "").partition("Exit codes:\n")
    for numbers in re.findall(
        r"^  ([\d, ]+):", listed if heading else "", re.MULTILINE
    ):
        yield from map(int, numbers.split(","))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "expected_ending":
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Tuple):
                    for constant in ast.walk(inner.value.elts[0]):
                        value = getattr(constant, "value", None)
                        if isinstance(value, int):
                            yield value


def documented_codes(page: str) -> set[int]:
    """The codes that have a row in the page of exit codes."""
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    return {int(code) for row in rows for code in row.split(",")}


if __name__ == "__main__":
    (FOLDER / "commands.md").write_text(commands_page(), encoding="utf-8")
    (FOLDER.parent / "knobs.md").write_text(knobs_page(), encoding="utf-8")
    (FOLDER / "recipe_keys.md").write_text(keys_page(), encoding="utf-8")
