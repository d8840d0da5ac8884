"""Writes the generated pages of docs/reference, and finds what the others leave out.

    python docs/reference.py

writes `commands.md` from each command's `--help` and `recipe_keys.md` from what the
packaged recipes declare. The functions below name what a user can see; a test compares
them with the pages.
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
from jshard.cli.commands import COMMANDS
from jshard.config.run_config import complete, declarations, flatten
from jshard.config.shared_keys import SHARED
from jshard.recipe.load import find_recipe, open_recipe

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "reference"
RECIPES = (
    "gpt.py", "gpt2_124m.py", "llama.py:3-8b", "finetune.py", "bert.py", "t5.py",
    "digits.py", "imagenet_regnet.py",
)  # fmt: skip
# What users' code imports from, apart from the pages' own blocks.
IMPORTING = ("models/*.py", "train/*.py", "examples/*.py")

COMMANDS_HEAD = """\
# Commands

Each is a program, `jshard-NAME`, and a module, `python -m jshard.NAME`. Written by
`python docs/reference.py` from their `--help`. [Exit codes](exit_codes.md) have a page.
"""
KEYS_HEAD = """\
# Keys of the packaged recipes

These are set by `--config.KEY=VALUE`, like [those that every recipe has](../knobs.md).
Written by `python docs/reference.py` from what the recipes declare.
"""
TABLE = """\
| Key | Default | Possible | Meaning |
|---|---|---|---|
"""


def commands_page() -> str:
    """The page of all commands, as Markdown."""
    sections = [
        f"\n## {name}\n\n`python -m jshard.{name}` {what}.\n\n"
        f"```text\n{help_of(name).strip()}\n```\n"
        for name, what in COMMANDS.items()
    ]
    return COMMANDS_HEAD + "".join(sections)


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


def keys_page() -> str:
    """The page of the packaged recipes' own keys, as Markdown."""
    page = KEYS_HEAD
    for name in RECIPES:
        with open_recipe(find_recipe(name)) as recipe:
            config = complete(recipe.get_config(), recipe.name)
        values, declared = flatten(config), declarations(config)
        page += f"\n## {name}\n\n{TABLE}"
        for key in values:
            if key not in SHARED:
                knob = declared[key]
                cells = (f"`{key}`", f"`{values[key]!r}`", knob.possible(), knob.help)
                page += f"| {' | '.join(cells)} |\n"
    return page


def public_names(pages: dict[Path, str]) -> set[str]:
    """What users import: `jshard.__all__`, and what models, recipes, examples need."""
    names = {f"jshard.{name}" for name in jshard.__all__} - {"jshard.__version__"}
    files = [path for pattern in IMPORTING for path in REPOSITORY.glob(pattern)]
    sources = [path.read_text() for path in files]
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    sources += [block for text in pages.values() for block in blocks.findall(text)]
    return names.union(*map(_imported, sources))


def _imported(source: str) -> set[str]:
    """Names that a program imports from within jshard."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith("jshard.")
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
    (FOLDER / "recipe_keys.md").write_text(keys_page(), encoding="utf-8")
