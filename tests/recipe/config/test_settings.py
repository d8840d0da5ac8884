"""A run's settings: every shared key, with its type, from the config of a recipe."""

import ast
import dataclasses
import typing
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete
from jshard.recipe.config.settings import RunSettings, settings_of
from jshard.recipe.config.shared_keys import REQUIRED, SHARED
from jshard.system.cli.knob import knobs

ROOT = Path(__file__).parents[3]
GIVEN = {
    "steps": 7,
    "batch_size": 3,
    "eval_tasks": ["hellaswag"],
    "mesh.replica": "hosts",
    "policy.remat": "names:a+b",
    "policy.accumulate": "fit",
    "checkpoint.local_dir": Path("/dev/here"),
    "watch.stuck": 60,
}


def fields(cls: type = RunSettings, prefix: str = ""):
    """The type of each field, by dotted key."""
    for name, kind in typing.get_type_hints(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def test_settings_have_the_values_of_the_config_as_their_keys_have_them():
    config = complete(ConfigDict({"steps": 1, "batch_size": 1}), "a.py")
    override(config, GIVEN, "a.py")
    settings = settings_of(config)
    assert (settings.steps, settings.batch_size, settings.seed) == (7, 3, 0)
    assert settings.eval_tasks == ("hellaswag",)
    assert settings.mesh.replica == "hosts"
    assert settings.policy.remat == "names:a+b"
    assert settings.policy.open_keys == ["policy.accumulate"]
    assert settings.checkpoint.local_dir == "/dev/here"
    assert settings.watch.limit == 60.0
    assert settings_of(complete(config, "a.py")).watch == settings.watch
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.steps = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_of_a_config_that_sets_nothing_are_the_declared_defaults():
    bare = ConfigDict({key: SHARED[key].default for key in REQUIRED})
    assert settings_of(complete(bare, "a.py")) == RunSettings()


@pytest.mark.parametrize(("key", "annotation"), list(fields()))
def test_a_key_and_its_field_have_one_type(key, annotation):
    declared = knobs(RunSettings)[key]
    assert declared is SHARED[key]
    allowed = typing.get_args(annotation) or (annotation,)
    literal = [x for one in allowed for x in typing.get_args(one) if x is not ...]
    kind = str if declared.kind is Path else declared.kind
    assert kind in allowed or typing.get_origin(annotation) is kind
    others = [x for x in declared.also if not isinstance(x, kind)]
    assert [x for x in literal if isinstance(x, str)] == others


FILES = {
    file.relative_to(ROOT / "jshard"): ast.parse(file.read_text())
    for room in ("recipe", "training", "plan", "inference")
    for file in (ROOT / "jshard" / room).rglob("*.py")
}
BELOW = {file: tree for file, tree in FILES.items() if file.parts[0] != "recipe"}


def test_settings_are_made_in_one_place():
    calls = [
        str(file)
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "settings_of"
    ]
    assert calls == ["recipe/configured.py"]


def test_outside_of_recipes_no_function_and_no_class_takes_a_config():
    taken = [
        f"{file}: {ast.unparse(node)}"
        for file, tree in BELOW.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg | ast.AnnAssign)
        and "ConfigDict" in ast.unparse(node.annotation or ast.Constant(None))
    ]
    door = "training/trainer.py: self.config: ConfigDict = "
    assert [x for x in taken if not x.startswith(door)] == []


def test_outside_of_recipes_a_config_is_handed_on_and_not_read():
    read = [
        f"{file}: {ast.unparse(node)}"
        for file, tree in BELOW.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Subscript)
        and ast.unparse(node.value).endswith(("configured.config", "self.config"))
    ]
    assert read == []
