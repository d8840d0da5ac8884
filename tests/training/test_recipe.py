"""Recipes: where they are found, and what they import."""

import sys
import types
import warnings
from pathlib import Path

import pytest

import jshard
from jshard.config.run_config import complete
from jshard.errors import UserError
from jshard.recipe import load as recipes
from jshard.recipe.build import make_job
from jshard.recipe.load import find_recipe, open_recipe

RECIPE = """\
def get_config(): return {"whose": WHOSE}
def make_model(config, rngs): ...
def make_optimizer(config): ...
def loss_fn(model, batch): ...
def make_data(config, split): ...
"""
IMPORTING = f"from models.net import WHOSE\n{RECIPE}"
OWN = f"WHOSE = 'own'\n{RECIPE}"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def whose(file: Path) -> str:
    with open_recipe(file) as recipe:
        return recipe.get_config()["whose"]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The current folder, with a `models` of its own that Python prefers."""
    folder = tmp_path / "elsewhere"
    write(folder / "models/__init__.py", "")
    write(folder / "models/net.py", "WHOSE = 'foreign'")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The folder of the packaged recipes."""
    folder = tmp_path / "packaged/train"
    write(folder.parent / "models/net.py", "WHOSE = 'packaged'")
    monkeypatch.setattr(recipes, "packaged_recipes", lambda: folder)
    # Not the real ones, when the tests run in a checkout.
    others = [p for p in sys.path if not Path(p, "models/gpt.py").exists()]
    monkeypatch.setattr(sys, "path", others)
    return folder


# Where a recipe is found.


def test_a_recipe_is_looked_for_as_given_then_in_train_then_among_the_packaged(
    elsewhere, packaged
):
    for file in (
        packaged / "gpt.py",
        elsewhere / "train/gpt.py",
        elsewhere / "gpt.py",
    ):
        write(file, OWN)
        assert find_recipe("gpt.py") == find_recipe("gpt") == str(file)
        assert (
            find_recipe("gpt.py:a/b:c") == find_recipe("gpt:a/b:c") == f"{file}:a/b:c"
        )


def test_a_recipe_that_is_not_there_is_an_error_that_lists_where_it_was_looked_for(
    elsewhere, packaged
):
    with pytest.raises(UserError) as error:
        find_recipe("nosuch.py")
    for place in ("nosuch.py", "train/nosuch.py", str(packaged / "nosuch.py")):
        assert place in str(error.value)


def test_a_colon_in_a_folders_name_begins_no_argument(tmp_path):
    file = write(tmp_path / "12:30/own.py", OWN)
    assert find_recipe(str(file)) == str(file)
    assert find_recipe(f"{file}:x") == f"{file}:x"
    with open_recipe(f"{file}") as recipe:
        assert (recipe.file, recipe.argument, recipe.name) == (file, None, "own")


def test_the_recipes_of_a_checkout_are_beside_the_package():
    assert recipes.packaged_recipes() == Path(__file__).parents[2] / "train"


# The argument of a recipe.

SIZED = OWN.replace(
    "get_config(): return {", "get_config(size=None): return {'size': size, "
)


@pytest.mark.parametrize("argument", [None, "3-8b", "", "gs://a//b", "x.py:y"])
def test_get_config_is_given_what_follows_the_recipe_and_a_colon(argument, tmp_path):
    file = write(tmp_path / "sized.py", SIZED)
    path = str(file) if argument is None else f"{file}:{argument}"
    with open_recipe(find_recipe(path)) as recipe:
        assert recipe.get_config()["size"] == argument
        assert (recipe.file, recipe.path) == (file, path)
        assert recipe.name == ("sized" if argument is None else f"sized:{argument}")


@pytest.mark.parametrize(
    ("parameters", "name", "said"),
    [
        ("", "own.py:x", "too many positional arguments; use --config=own.py"),
        (
            "size",
            "own.py",
            "missing a required argument: 'size'; use --config=own.py:A",
        ),
    ],
)
def test_an_argument_that_is_missing_or_too_much_is_a_users_error(
    parameters, name, said, tmp_path
):
    write(tmp_path / "own.py", OWN.replace("get_config()", f"get_config({parameters})"))
    with pytest.raises(UserError) as error, open_recipe(tmp_path / name):
        pass
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# What a recipe imports.


def test_a_packaged_recipe_imports_its_own_models_in_a_folder_that_has_others(
    elsewhere, packaged
):
    assert whose(write(packaged / "gpt.py", IMPORTING)) == "packaged"


@pytest.mark.parametrize("init", [True, False])
def test_a_users_project_imports_its_own_models(init, elsewhere, packaged, tmp_path):
    project = tmp_path / "project"
    write(project / "models/net.py", "WHOSE = 'project'")
    if init:
        write(project / "models/__init__.py", "")
    assert whose(write(project / "train/gpt.py", IMPORTING)) == "project"
    assert whose(write(project / "gpt.py", IMPORTING)) == "project"
    assert whose(write(project / "experiments/gpt.py", IMPORTING)) == "project"


def test_a_project_without_models_imports_the_packaged_ones(
    packaged, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert whose(write(tmp_path / "alone/gpt.py", IMPORTING)) == "packaged"


def test_a_recipe_imports_its_own_models_when_others_are_imported_already(
    elsewhere, packaged, monkeypatch
):
    foreign = types.ModuleType("models")
    monkeypatch.setitem(sys.modules, "models", foreign)
    monkeypatch.setitem(sys.modules, "models.net", types.ModuleType("models.net"))
    monkeypatch.delitem(sys.modules, "train.gpt", raising=False)  # another test's
    path = sys.path.copy()
    assert whose(write(packaged / "gpt.py", IMPORTING)) == "packaged"
    assert sys.modules["models"] is foreign
    assert "train.gpt" not in sys.modules
    assert sys.path == path


def test_a_recipes_functions_may_import_when_they_are_called(elsewhere, packaged):
    lazy = IMPORTING.replace("from models.net import WHOSE", "").replace(
        "return", "from models.net import WHOSE; return"
    )
    assert whose(write(packaged / "gpt.py", lazy)) == "packaged"


def test_a_recipe_may_build_on_the_one_whose_name_it_has(packaged, tmp_path):
    write(packaged / "gpt.py", OWN.replace("own", "packaged"))
    text = f"from train.gpt import WHOSE\n{RECIPE}"
    assert whose(write(tmp_path / "mine/gpt.py", text)) == "packaged"


@pytest.mark.parametrize("name", ["get_config", "make_model", "loss_fn", "make_data"])
def test_a_recipe_that_lacks_a_function_is_an_error_that_names_it(name, tmp_path):
    file = write(tmp_path / "bad.py", OWN.replace(name, "other"))
    with pytest.raises(UserError, match=rf"bad\.py lacks the function {name}\(\)"):
        whose(file)


def test_a_recipe_whose_function_is_a_value_is_an_error_that_names_it(tmp_path):
    file = write(tmp_path / "bad.py", f"{OWN}references = 3")
    with pytest.raises(UserError, match=r"references in recipe .*is not a function"):
        whose(file)


WITH_UNITS = """\
import optax
from flax import nnx
from ml_collections import ConfigDict
from jshard import Mean

class Block(nnx.Linear): ...

def make_model(config, rngs):
    return nnx.Sequential(*[Block(64, 64, rngs=rngs) for _ in range(2)])

def units(config): return (Block,) if config.wrapped else ()
def get_config(): return ConfigDict({"wrapped": True, "steps": 1, "batch_size": 8})
def make_optimizer(config): return optax.sgd(1e-2)
def loss_fn(model, x): return Mean(model(x).sum(), len(x))
def make_data(config, split): ...
"""


def test_a_recipe_may_say_which_module_types_are_units(tmp_path):
    file = write(tmp_path / "recipe.py", WITH_UNITS)
    with open_recipe(file) as recipe:
        config = complete(recipe.get_config(), recipe.name)
        with warnings.catch_warnings():  # of a large root
            warnings.simplefilter("error")
            job = make_job(recipe, config, jshard.make_mesh())
            job.abstract_state()
        assert [unit.__name__ for unit in job.fsdp.units] == ["Block"]
        config.wrapped = False
        with pytest.warns(UserWarning, match="in no Stack or Unit"):
            make_job(recipe, config, jshard.make_mesh()).abstract_state()


def test_a_syntax_error_is_an_error_that_names_file_and_line(tmp_path):
    file = write(tmp_path / "bad.py", f"{OWN}\nx = = 1\n")
    with pytest.raises(UserError, match=r"bad\.py:8: invalid syntax"):
        whose(file)


def test_a_syntax_error_in_a_model_names_the_models_file(tmp_path):
    write(tmp_path / "models/net.py", "\n\nx = = 1")
    with pytest.raises(UserError, match=r"models/net\.py:3: invalid syntax"):
        whose(write(tmp_path / "bad.py", IMPORTING))


def test_a_failing_import_is_an_error_that_names_file_line_and_module(tmp_path):
    file = write(tmp_path / "bad.py", "\nimport nosuchmodule")
    with pytest.raises(UserError, match=r"bad\.py:2: No module named 'nosuchmodule'"):
        whose(file)
