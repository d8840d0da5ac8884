"""What a user sees is documented: names, config keys, commands, exit codes."""

import pkgutil
import re
import runpy
from pathlib import Path

import pytest

from jshard.recipe.config.shared_keys import SHARED
from jshard.system.cli.commands import COMMANDS

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
REFERENCE = runpy.run_path(str(DOCS / "reference.py"))
BLOCKS = runpy.run_path(str(DOCS / "blocks.py"))
PAGES = {page: page.read_text() for page in BLOCKS["pages"]()}
COMMANDS_PAGE = PAGES[DOCS / "reference" / "commands.md"]
CODES_PAGE = PAGES[DOCS / "reference" / "exit_codes.md"]


def undocumented_names(pages: dict[Path, str]) -> set[str]:
    return REFERENCE["public_names"](pages) - REFERENCE["documented_names"](pages)


def undocumented_options(page: str, command: str, printed: str) -> set[str]:
    """Options of a command that its section of the page leaves out."""
    _, heading, rest = page.partition(f"\n## {command}\n")
    section = rest.partition("\n## ")[0] if heading else ""
    return REFERENCE["options_of"](printed) - REFERENCE["options_of"](section)


def undocumented_keys(page: str, keys: set[str]) -> set[str]:
    return {key for key in keys if f"\n- `{key}`: " not in page}


def unknown_keys(text: str) -> set[str]:
    """Keys that a page sets on the command line, and that no recipe has.

    A recipe on the page declares keys of its own, as ``"name": Key(``.
    """
    listed = PAGES[DOCS / "knobs.md"] + PAGES[DOCS / "reference" / "recipe_keys.md"]
    known = set(re.findall(r"^- `([\w.]+)`: ", listed, re.MULTILINE))
    known |= {key.partition(".")[0] for key in known} | {"policy.precision"}
    own = tuple(f".{name}" for name in re.findall(r'"(\w+)": Key\(', text))
    given = set(re.findall(r"--config\.([a-z_][\w.]*\w)", text)) - known - {"key"}
    return {key for key in given if not key.endswith(own)}


def missing_names(text: str) -> set[str]:
    """Names below jshard that a page writes and that are not there."""
    missing = set()
    for name in set(re.findall(r"(?<![\w./-])jshard(?:\.[A-Za-z_]\w*)+", text)):
        try:
            pkgutil.resolve_name(name)
        except AttributeError:
            missing |= {name} - {"jshard.NAME", "jshard.COMMAND"}
    return missing


def test_names_that_pages_write_exist():
    assert {str(p): names for p in PAGES if (names := missing_names(PAGES[p]))} == {}
    assert missing_names("`jshard.fsdp.state`, jshard.Dropout") == {"jshard.fsdp.state"}


def test_public_names_are_documented():
    assert not undocumented_names(PAGES)


def test_documented_names_exist():
    import importlib

    for name in REFERENCE["documented_names"](PAGES):
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError:
            found = None
        assert found is not None or importlib.import_module(name), name


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands_are_documented(command):
    printed = REFERENCE["help_of"](command)
    assert "--" in printed
    assert not undocumented_options(COMMANDS_PAGE, command, printed), (
        "run python docs/reference.py"
    )


def test_shared_keys_are_documented():
    page = PAGES[DOCS / "knobs.md"]
    assert not undocumented_keys(page, set(SHARED))
    assert page == REFERENCE["knobs_page"](), "run python docs/reference.py"


def test_keys_of_recipes_are_documented():
    page = PAGES[DOCS / "reference" / "recipe_keys.md"]
    assert page == REFERENCE["keys_page"](), "run python docs/reference.py"


def test_keys_that_pages_set_exist():
    unknown = {str(page): unknown_keys(text) for page, text in PAGES.items()}
    assert {page: keys for page, keys in unknown.items() if keys} == {}


def test_exit_codes_are_documented():
    assert REFERENCE["exit_codes"]() == REFERENCE["documented_codes"](CODES_PAGE)


def test_what_is_added_is_missed(tmp_path, monkeypatch):
    import jshard

    monkeypatch.setattr(jshard, "__all__", [*dir(jshard), "brand_new"])
    page = {
        tmp_path
        / "page.md": "```python\nfrom jshard.sharding.settings.loss import other\n```\n"
    }
    missed = undocumented_names(PAGES | page)
    assert missed == {"jshard.brand_new", "jshard.sharding.settings.loss.other"}

    assert undocumented_keys(PAGES[DOCS / "knobs.md"], {"policy.new"}) == {"policy.new"}
    assert unknown_keys("--config.policy.old=1 --config.steps=2") == {"policy.old"}
    assert undocumented_options(COMMANDS_PAGE, "train", "--newest=1") == {"--newest"}
    assert undocumented_options(COMMANDS_PAGE, "new", "--help") == {"--help"}

    module = tmp_path / "jshard" / "command.py"
    module.parent.mkdir()
    module.write_text('"""A command.\n\nExit codes:\n  0: Done.\n  4: New.\n"""\n')
    found = REFERENCE["exit_codes"]
    monkeypatch.setitem(found.__globals__, "REPOSITORY", tmp_path)
    assert found() == {0, 4}
    assert found() - REFERENCE["documented_codes"](CODES_PAGE) == {4}
