"""The page for users of HF Trainer, PEFT and TRL: its tables are ours, and theirs."""

import ast
import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from jshard.recipe.config.run_config import flatten
from jshard.recipes import finetune, preference
from jshard.system.cli.other_libraries import answers_of

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = runpy.run_path(str(DOCS / "options.py"))
PAGE = OPTIONS["PAGE"].read_text()
# A field of theirs and its default, a key of ours and its default.
DEFAULTS = re.findall(
    r"^\| `(\w+)\.(\w+)` \| `(.*?)` \| (.*?) \| `(.*?)` \|$", PAGE, re.M
)
HOMES = {
    "TrainingArguments": ("transformers", "Hugging Face's Trainer"),
    "LoraConfig": ("peft", "PEFT"),
    "SFTConfig": ("trl", "TRL"),
    "DPOConfig": ("trl", "TRL"),
}


def test_tables_of_options_are_those_that_messages_answer_from():
    assert OPTIONS["with_tables"](PAGE) == PAGE, "run python docs/options.py"
    for library in OPTIONS["LIBRARIES"]:
        assert len(answers_of(library)) > 20
        assert all(f"`{name}`" in PAGE for name in answers_of(library))
    assert "~" not in PAGE


def test_defaults_that_are_stated_of_ours_are_so():
    own = flatten(preference.get_config()) | flatten(finetune.get_config())
    assert len(DEFAULTS) == 19
    for _, _, _, ours, default in DEFAULTS:
        value: Any = ast.literal_eval(default)
        if recipe := re.match(r"`(\w+)\.py`", ours):
            assert (
                value
                == {"finetune": finetune, "preference": preference}[recipe[1]].RATES
            )
        else:
            assert own[ours.strip("`")] == value


@pytest.mark.slow
@pytest.mark.parametrize("name", HOMES)
def test_defaults_that_are_stated_of_theirs_are_so(name):
    module, library = HOMES[name]
    cls = getattr(pytest.importorskip(module), name)
    fields = {x.name: x for x in dataclasses.fields(cls)}
    for other, field, default, *_ in DEFAULTS:
        if other == name:
            made = fields[field]
            if made.default is dataclasses.MISSING:
                assert made.default_factory is not dataclasses.MISSING
                assert made.default_factory() == ast.literal_eval(default), field
            else:
                assert made.default == ast.literal_eval(default), field
    inherited = set(answers_of(OPTIONS["LIBRARIES"][0]))
    assert set(fields) <= set(answers_of(library)) | inherited | {"seed"}
