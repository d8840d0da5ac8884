"""The page for users of HF Trainer, PEFT and TRL: its tables are ours, and theirs."""

import ast
import dataclasses
import functools
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from jshard.recipe.config.run_config import complete, flatten
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.schedule.rates import rate_schedule
from jshard.recipes import finetune, preference
from jshard.system.cli.other_libraries import answers_of, keys_of

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = runpy.run_path(str(DOCS / "options.py"))
PAGE = OPTIONS["PAGE"].read_text()
# A field of theirs and its default, a key of ours and its default.
DEFAULTS = re.findall(
    r"^\| `(\w+)\.(\w+)` \| `(.*?)` \| (.*?) \| `(.*?)` \|$", PAGE, re.M
)
# The module of a dataclass, its table, and the recipe that stands for it.
HOMES = {
    "TrainingArguments": ("transformers", "Hugging Face's Trainer", "finetune.py"),
    "LoraConfig": ("peft", "PEFT", "finetune.py"),
    "SFTConfig": ("trl", "TRL", "finetune.py"),
    "DPOConfig": ("trl", "TRL", "preference.py"),
}


def test_tables_of_options_are_those_that_messages_answer_from():
    assert OPTIONS["with_tables"](PAGE) == PAGE, "run python docs/options.py"
    for library in OPTIONS["LIBRARIES"]:
        assert len(answers_of(library)) > 20
        assert all(f"`{name}`" in PAGE for name in answers_of(library))
    assert "~" not in PAGE


@functools.cache
def keys_of_recipe(name: str) -> dict[str, Any]:
    """All keys of a packaged recipe and their defaults."""
    with open_recipe(find_recipe(name)) as recipe:
        return flatten(complete(recipe.get_config(), recipe.name)) | {"model.from": ""}


def test_defaults_that_are_stated_of_ours_are_so():
    own = keys_of_recipe("preference.py") | keys_of_recipe("finetune.py")
    assert len(DEFAULTS) == 39
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
    fields = {x.name: x for x in dataclasses.fields(peer(name))}
    for other, field, default, *_ in DEFAULTS:
        if other == name:
            made = fields[field]
            if made.default is dataclasses.MISSING:
                assert made.default_factory is not dataclasses.MISSING
                assert made.default_factory() == ast.literal_eval(default), field
            else:
                assert made.default == ast.literal_eval(default), field


@pytest.mark.slow
@pytest.mark.parametrize("name", HOMES)
def test_every_field_of_theirs_has_a_row_with_keys_of_the_recipe_or_none(name):
    library, recipe = HOMES[name][1], HOMES[name][2]
    answers = answers_of(OPTIONS["LIBRARIES"][0]) | answers_of(library)
    inherited = set()
    if library == "TRL":  # whose rows are those of the first table
        inherited = {x.name for x in dataclasses.fields(peer("TrainingArguments"))}
    for field in dataclasses.fields(peer(name)):
        if field.name == "seed":  # ours has the name
            continue
        assert field.name in answers, f"{name}.{field.name} has no row"
        answer = answers[field.name]
        own = re.findall(r"in (\w+\.py)", answer) or [recipe]
        if (keys := keys_of(answer)) and field.name not in inherited:
            assert any(set(keys) & set(keys_of_recipe(x)) for x in own), field.name


def peer(name: str) -> Any:
    return getattr(pytest.importorskip(HOMES[name][0]), name)


SCHEDULES = {
    "linear": ("linear", {}, {}),
    "polynomial": ("linear", {"lr_end": 5e-4}, {"final_fraction": 0.25}),
    "cosine": ("cosine", {}, {}),
    "cosine_with_restarts": (
        "cosine_with_restarts",
        {"num_cycles": 3},
        {"cycles": 3},
    ),
    "cosine_with_min_lr": ("cosine", {"min_lr_rate": 0.3}, {"final_fraction": 0.3}),
    "constant": ("constant", {}, {"warmup_steps": 0}),
    "constant_with_warmup": ("constant", {}, {}),
    "warmup_stable_decay": ("wsd", {"num_decay_steps": 6}, {"decay_steps": 6}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's scheduler without an optimizer
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_get_scheduler(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours, theirs, keys = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = transformers.get_scheduler(
        name, optimizer, 4, 30, scheduler_specific_kwargs=theirs
    )
    mine = rate_schedule(ours, peak=2e-3, steps=30, **{"warmup_steps": 4} | keys)
    for step in range(30):
        want = optimizer.param_groups[0]["lr"]
        assert float(mine(step)) == pytest.approx(want, rel=1e-5, abs=1e-9), step
        schedule.step()
