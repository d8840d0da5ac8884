"""Recipes: where they are found, and what they import."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import jshard
from jshard.recipe import recipe_path as recipes
from jshard.recipe.build import make_job
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.system.errors import UserError

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


@pytest.fixture(autouse=True)
def no_models():
    """Projects of other tests, of which each is meant to be the first here."""
    yield
    for name in [x for x in sys.modules if x.split(".")[0] == "models"]:
        del sys.modules[name]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The current folder, with a `models` of its own, on the path."""
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
    monkeypatch.setattr(recipes, "packaged_recipes", lambda: folder)
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
    package = Path(jshard.__file__).parent
    assert recipes.packaged_recipes() == package / "recipes"
    for name in ("models", "recipes"):
        assert (package / name / "gpt.py").is_file()
    assert find_recipe("gpt2_124m") == str(
        (package / "recipes" / "gpt2_124m.py").resolve()
    )


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


def project(folder: Path, name: str = "project", init: bool = True) -> Path:
    """A recipe in a folder with a `models` of its own."""
    write(folder / "models/net.py", f"WHOSE = {name!r}")
    if init:
        write(folder / "models/__init__.py", "")
    return write(folder / "own.py", IMPORTING)


@pytest.mark.parametrize("init", [True, False])
def test_a_recipe_imports_what_is_beside_it(init, tmp_path):
    path = sys.path.copy()
    assert whose(project(tmp_path / "project", init=init)) == "project"
    assert sys.path == path


def test_what_is_beside_a_recipe_comes_before_what_is_in_the_current_folder(
    elsewhere, tmp_path
):
    assert whose(project(tmp_path / "project")) == "project"


def test_a_recipes_functions_may_import_when_they_are_called(tmp_path):
    file = project(tmp_path / "project")
    lazy = RECIPE.replace("return", "from models.net import WHOSE; return")
    assert whose(write(file, lazy)) == "project"


def test_a_recipe_may_build_on_the_packaged_one_whose_name_it_has(tmp_path):
    text = f"from jshard.recipes.gpt import get_config as base\n{RECIPE}"
    text = text.replace("WHOSE", "base().model.width")
    assert whose(write(tmp_path / "mine/gpt.py", text)) == 128


def test_two_recipes_of_one_name_are_two_modules(tmp_path):
    first = write(tmp_path / "first/own.py", OWN)
    second = write(tmp_path / "second/own.py", OWN.replace("own", "second"))
    with open_recipe(first) as one, open_recipe(second) as other:
        assert one.get_config()["whose"] == "own"
        assert other.get_config()["whose"] == "second"
        names = [x.make_model.__module__ for x in (one, other)]
    assert len({*names}) == 2
    assert {*names} <= {*sys.modules}


def test_two_projects_with_models_of_their_own_are_refused_in_one_process(tmp_path):
    first = project(tmp_path / "first", "first")
    second = project(tmp_path / "second", "second")
    assert whose(first) == "first"
    with pytest.raises(UserError) as error:
        whose(second)
    for place in (second, tmp_path / "first/models", tmp_path / "second/models"):
        assert str(place) in str(error.value)
    assert "load this recipe in a process of its own" in str(error.value)
    assert "\n" not in str(error.value)
    assert whose(first) == "first"


def test_a_model_that_imports_another_projects_module_is_refused(tmp_path):
    first = project(tmp_path / "first", "first")
    second = tmp_path / "second"
    write(second / "models/net.py", "WHOSE = 'second'")
    write(second / "layers.py", "from models.net import WHOSE")
    write(second / "own.py", f"from layers import WHOSE\n{RECIPE}")
    assert whose(first) == "first"
    with pytest.raises(UserError, match=r"layers\.py imports 'models'"):
        whose(second / "own.py")
    del sys.modules["layers"]


def test_a_module_that_another_project_has_and_this_one_lacks_is_named(tmp_path):
    first = project(tmp_path / "first", "first")
    second = project(tmp_path / "second", "second")
    write(second, f"from models.other import WHOSE\n{RECIPE}")
    write(second.parent / "models/other.py", "WHOSE = 'other'")
    assert whose(first) == "first"
    with pytest.raises(UserError, match="load this recipe in a process of its own"):
        whose(second)


def test_a_folder_without_init_that_a_library_hides_is_refused(elsewhere, tmp_path):
    with pytest.raises(UserError, match="if it is a library's, rename models"):
        whose(project(tmp_path / "project", init=False))


@pytest.mark.slow
def test_two_projects_with_models_of_their_own_run_in_two_processes(tmp_path):
    code = (
        "import sys; from jshard.recipe.load import open_recipe\n"
        "with open_recipe(sys.argv[1]) as recipe: print(recipe.get_config()['whose'])"
    )
    for name in ("first", "second"):
        file = project(tmp_path / name, name)
        run = subprocess.run(
            [sys.executable, "-c", code, str(file)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert run.stdout == f"{name}\n"


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
            job = make_job(configure(recipe, config), jshard.make_mesh())
            job.abstract_state()
        assert [unit.__name__ for unit in job.fsdp.units] == ["Block"]
        config.wrapped = False
        with pytest.warns(UserWarning, match="in no Stack or Unit"):
            make_job(configure(recipe, config), jshard.make_mesh()).abstract_state()


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
