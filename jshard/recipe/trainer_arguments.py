"""What a `Trainer` is given: a recipe, parts of one, and keys of the config."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jshard.data.iterables import Once
from jshard.data.places import state_methods
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import check, complete, epochs_in, flatten
from jshard.recipe.config.shared_keys import REQUIRED, SHARED
from jshard.recipe.contract import ARGUMENTS, check_signature
from jshard.recipe.definition import Recipe, recipe_of
from jshard.recipe.load import find_recipe, load_recipe, own_folder
from jshard.recipe.make_config import make_config, pin_names
from jshard.recipe.recipe_path import split_path
from jshard.recipe.schedule.epochs import set_epochs, take_epochs
from jshard.system.cli.other_libraries import counterpart
from jshard.system.cli.user_code import describe_user_error
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

SPLITS = ("train", "validation", "test")
_FUNCTIONS = tuple(name for name in ARGUMENTS if name != "get_config")
_TRACED = ("make_model", "loss_fn", "predict_fn")
_PARTS = (*_FUNCTIONS, *(f"{split}_data" for split in SPLITS))
_OPTIONS = ("on_step", "on_evaluation", "on_checkpoint", "config", "workdir")

# Mistakes that a function shows while it is traced.
_MISTAKES = (TypeError, ValueError, KeyError, IndexError, AttributeError)


def recipe_of_parts(
    recipe: Any, parts: Mapping[str, Any]
) -> tuple[Recipe, Callable[[], AbstractContextManager[Any]]]:
    """Returns a recipe with the parts that take the place of its own.

    Args:
      recipe: A path or name, a module, an opened `Recipe`, or None.
      parts: The functions of a recipe, and data by split as `train_data` and so on.

    Returns:
      The recipe, and the context in which its functions can be called.

    Raises:
      UserError: Something is missing, unknown or impossible.
    """
    if unknown := [name for name in parts if name not in _PARTS]:
        known = (*_PARTS, *_OPTIONS)
        hint = counterpart(unknown[0], "config key ").replace("--workdir", "workdir")
        hint = hint or did_you_mean(unknown[0], known)
        hint = hint or f"; it has {', '.join(known)}"
        raise UserError(f"Trainer: unknown argument {unknown[0]!r}{hint}")
    functions = {name: parts[name] for name in _FUNCTIONS if name in parts}
    data = {
        split: Once(value)
        if isinstance(value, Iterator) and not state_methods(value)
        else value
        for split in SPLITS
        if (value := parts.get(f"{split}_data")) is not None
    }
    if data and "make_data" in functions:
        raise UserError("Trainer: give make_data, or the data of splits, not both")
    if data:
        functions["make_data"] = lambda config, split: data.get(split)
    if isinstance(recipe, Recipe):  # of the command line, which has these errors itself
        return dataclasses.replace(recipe, **functions), nullcontext
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    if recipe is None:
        own = types.SimpleNamespace(get_config=ConfigDict, **functions)
        opened = recipe_of(own, None)
    elif isinstance(recipe, types.ModuleType):
        file = getattr(recipe, "__file__", None)
        opened = recipe_of(recipe, Path(file) if file else None)
    elif isinstance(recipe, str | Path):
        name, argument = split_path(find_recipe(str(recipe)))
        within = functools.partial(own_folder, Path(name))
        with within():
            opened = load_recipe(Path(name), argument)
    else:
        raise UserError(
            f"Trainer: recipe={recipe!r} must be a file, the name of a recipe, or a "
            "module; give its parts by keyword"
        )
    for name, function in functions.items():
        if not callable(function):
            raise UserError(f"Trainer: {name}={function!r} is not a function")
        check_signature(function, name, ARGUMENTS[name])
    opened = dataclasses.replace(opened, **functions)
    checked = {name: _in_one_line(getattr(opened, name), name) for name in _TRACED}
    return dataclasses.replace(opened, **checked), within


def config_of(recipe: Recipe, config: Any, workdir: Path | None) -> ConfigDict:
    """Returns a run's config, complete and checked.

    Args:
      recipe: The recipe.
      config: Keys to set, as a dict, nested or with dots; or a `ConfigDict`, the whole
        config, which may have keys of its own without a recipe, too.
      workdir: The run's folder, if there may be a run to resume.

    Raises:
      UserError: A key is missing, unknown, or has an impossible value.
    """
    if isinstance(config, ConfigDict):
        epochs = epochs_in(config.get("steps"))
        whole = complete(config, recipe.name, "Trainer(config=...)")
    elif not isinstance(config, Mapping | None):
        raise UserError(f"Trainer: config={config!r} must be a dict or a ConfigDict")
    else:
        given, epochs = take_epochs(flatten(config or {}), recipe)
        if recipe.file is not None or recipe.get_config():
            whole = make_config(recipe, given, workdir)
        else:
            whole = _only_shared_keys(given, recipe.name)
    pin_names(whole, workdir)
    check(whole)
    set_epochs(recipe, whole, epochs)
    return whole


def _only_shared_keys(values: Mapping[str, Any], recipe: str) -> ConfigDict:
    """Returns the config of a recipe that has none."""
    for key in values:
        if key not in SHARED:
            hint = counterpart(key, "", SHARED) or did_you_mean(key, SHARED)
            raise UserError(
                f"Trainer(config=...): unknown key {key!r}{hint}; "
                "keys of your own go in an ml_collections.ConfigDict, the whole config"
            )
    required = ConfigDict({key: values[key] for key in REQUIRED if key in values})
    config = complete(required, recipe, "Trainer(config=...)")
    override(config, values, recipe)
    return config


def _in_one_line(function: Callable[..., Any] | None, name: str) -> Any:
    """Makes mistakes that a function shows while it is traced a UserError."""
    if function is None:
        return None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _MISTAKES as error:
            described = describe_user_error(error)
            if isinstance(error, UserError) or described is None:
                raise
            raise UserError(f"{name}: {described[0]}") from error

    return checked
