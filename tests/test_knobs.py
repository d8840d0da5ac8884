"""A knob is declared once: checks, config keys, help and docs follow."""

import dataclasses
import pydoc
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import jshard
from jshard.recipe.config.overrides import keys_help, override, read_words
from jshard.recipe.config.policy_keys import make_policy
from jshard.recipe.config.run_config import complete
from jshard.recipe.config.shared_keys import DEFAULTS
from jshard.system.cli.knob import Knob, described, knob, knobs

ROOT = Path(__file__).parents[1]
# These have a form of their own in a config, read by recipe/config/policy_keys.py.
WITH_OWN_FORM = {"remat", "overrides"}


@described
@dataclasses.dataclass(frozen=True)
class LargerPolicy(jshard.Policy):
    """A policy with another knob."""

    patience: int = knob(3, "steps to wait", at_least=1, noun="a number of steps")


def other_than_default(declared: Knob) -> object:
    """A possible value that is not the default."""
    values = [*declared.choices, not declared.default, 2, 0.5]
    return next(
        x for x in values if declared.allows(x) and repr(x) != repr(declared.default)
    )


def test_a_new_field_is_a_key_checked_and_explained():
    assert knobs(LargerPolicy, "policy.")["policy.patience"].default == 3
    assert "patience: steps to wait." in (LargerPolicy.__doc__ or "")
    assert LargerPolicy(patience=4).patience == 4
    for bad in (0, "4", None, 4.0, True):
        message = f"policy.patience: {bad!r} must be a number of steps, at least 1"
        with pytest.raises(jshard.UserError, match=re.escape(message)):
            LargerPolicy(patience=bad)  # pyright: ignore[reportArgumentType]


def test_help_explains_every_field_of_a_policy_with_its_values_and_default():
    text = " ".join(
        pydoc.plain(pydoc.render_doc(jshard.Policy)).replace("|", "").split()
    )
    for name, declared in knobs(jshard.Policy).items():
        default = declared.default if declared.default != () else "none"
        entry = f"{name}: {declared.help}. {declared.more}"
        entry += f" Possible: {declared.possible()}. Default: {default}."
        assert declared.more.endswith("."), name
        assert " ".join(entry.split()) in text
    for name in ("accumulate", "loss_scale", "ema_decay"):
        assert f"``{name}``" in text, "why it is a field"


def test_every_field_of_a_policy_is_a_key_of_the_config_and_nothing_else_is():
    fields = {f"policy.{field.name}" for field in dataclasses.fields(jshard.Policy)}
    fields -= {"policy.precision"}
    fields |= {
        f"policy.precision.{field.name}"
        for field in dataclasses.fields(jshard.Precision)
    }
    assert fields == {key for key in DEFAULTS if key.startswith("policy.")}


@pytest.mark.parametrize("name", sorted(knobs(jshard.Policy).keys() - WITH_OWN_FORM))
def test_a_value_of_the_command_line_reaches_the_policy(name):
    declared = knobs(jshard.Policy)[name]
    value = other_than_default(declared)
    config = complete(ConfigDict({"steps": 1, "batch_size": 8}), "r.py")
    assert f"--config.policy.{name}={declared.default}\n" in keys_help(config, "r.py")
    words = {f"policy.{name}": str(value)}
    override(config, read_words(config, words, "r.py"), "r.py")
    group, dot, field = name.partition(".")
    found = getattr(make_policy(config), group)
    assert (getattr(found, field) if dot else found) == value


def test_no_other_file_of_the_config_names_a_knob():
    names = {name.rpartition(".")[2] for name in knobs(jshard.Policy)}
    names -= {*WITH_OWN_FORM, "offload"}  # which is also a kind of remat
    for file in (ROOT / "jshard/recipe/config").glob("*.py"):
        words = set(re.findall(r'[".](\w+)"', file.read_text()))
        assert not words & names, file
