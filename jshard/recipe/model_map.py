"""Hugging Face models in a recipe: the key `model.from`, and where weights lie.

A recipe whose model can be exchanged with Hugging Face has an attribute `huggingface`,
a module with three functions, `model` being its config's group of that name:

- `read_config(json)` returns the values of `model.*` that a config.json says, or raises
  a UserError that names what the model does not have, with an attribute `unknown_key`
  if that is a key it does not know, which `model.ignore` may name;
- `write_config(model)` returns a config.json, or raises a UserError if there is no such
  model there;
- `tensors(model)` returns a `FileTensor` for every array of the model, by its name
  without stacking, like "blocks.3.up.kernel", one layer at a time.

Where config.model.tied lets the head be an embedding, the module may say in `TIED_HEAD`
which one, and what the files call a head of its own, and in `UNTIED` the keys of
`model.*` for files with a head that config.json does not mention.

An attribute `timm` is such a module for the folders of timm.
"""

import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.keys import Key
from jshard.recipe.config.run_config import declarations
from jshard.storage.hub import huggingface_folder as folders
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.online.download import cached_path, local_path
from jshard.storage.hub.tied_heads import other_head
from jshard.system.cli.knob import Knob
from jshard.system.errors import UserError, some_of, warn
from jshard.system.files.untrusted import read_json

FROM, IGNORE = "from", "ignore"  # keys in the group `model`
SOURCE, IGNORED = f"model.{FROM}", f"model.{IGNORE}"
FUNCTIONS = {
    "read_config": ("json",),
    "write_config": ("model",),
    "tensors": ("model",),
}
# Differences of these do not make it another model.
_FREE = ("sequence_length", "context_length")


# The keys `model.from` and `model.ignore`, which a recipe's own functions do not see.


def declare_source(get_config: Callable[[], ConfigDict]) -> Callable[[], ConfigDict]:
    """Adds these keys to the config that a recipe's function returns."""

    @functools.wraps(get_config)
    def call() -> ConfigDict:
        config = get_config()
        if isinstance(config, ConfigDict):
            if not isinstance(config.get("model"), ConfigDict):
                raise UserError(
                    "a recipe with `huggingface` needs a group config.model"
                )
            with config.unlocked():
                config.model[FROM] = Key(
                    "",
                    "take the architecture from the config.json of this Hugging Face "
                    "folder or name",
                    kind=Path,
                    hub="model",
                )
                config.model[IGNORE] = Key(
                    "",
                    "unknown keys of model.from's config.json to accept, like a,b",
                )
        return config

    return call


def hide_source(function: Callable[..., Any]) -> Callable[..., Any]:
    """Removes what is not the model's from the config that a recipe's function gets.

    The sizes are in the config, and `ModelConfig(**config.model)` stays possible.
    """

    @functools.wraps(function)
    def call(config: ConfigDict, *rest: Any) -> Any:
        if isinstance(config.get("model"), ConfigDict) and FROM in config.model:
            config = config.copy_and_resolve_references()
            with config.unlocked():
                del config.model[FROM], config.model[IGNORE]
        return function(config, *rest)

    return call


# The architecture.


def take_architecture(
    config: ConfigDict, map_of: Callable[[Path], types.ModuleType], workdir: Path | None
) -> None:
    """Sets the keys `model.*` as the folder that `model.from` names says.

    Where the folder is gone, a run that is resumed takes them from its own config.

    `map_of` returns the recipe's map of a folder.

    Raises:
      UserError: The folder cannot be read, or holds another architecture.
    """
    source = config.model[FROM]
    path, found = cached_path(source), None
    if workdir is not None and not (path / folders.CONFIG).exists():
        found = _recorded(workdir, source)
    if found is None:
        path = local_path(source, (folders.CONFIG,))
        found = read_architecture(path, map_of(path), config.model[IGNORE])
    declared = declarations(config)
    for key, value in found.items():
        _check_type(declared.get(f"model.{key}"), key, value, path)
    with config.unlocked():
        for key, value in found.items():
            _set(config.model, key, value)


def _check_type(declared: Knob | None, key: str, value: Any, folder: Path) -> None:
    """Raises UserError where a number or a truth value of the recipe is none there."""
    if declared is None or value is None or declared.kind not in (int, float, bool):
        return
    wanted = bool if declared.kind is bool else int | float
    fits = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
    if not fits or abs(value) > sys.float_info.max:
        raise UserError(
            f"{folder / folders.CONFIG}: model.{key} is {str(value)[:80]!r} there, not "
            f"{'true or false' if wanted is bool else 'a number'}"
        )


def read_architecture(
    folder: Path, huggingface: types.ModuleType, ignored: str = ""
) -> Mapping[str, Any]:
    """Returns the `model.*` keys that a Hugging Face folder's config.json says.

    Of the keys in `ignored`, "a,b", those count as missing that the map does not know.

    Raises:
      UserError: The folder cannot be read, or holds another architecture.
    """
    content = folders.read_config(folder)
    keys = [key.strip() for key in ignored.split(",") if key.strip()]
    try:
        return _with_head(folder, huggingface, _read(huggingface, content, keys))
    except UserError as error:
        advice = ""
        if key := getattr(error, "unknown_key", ""):
            known = ",".join([*keys, key])
            advice = (
                f"; if it changes nothing, set --config.{IGNORED}={known}, or "
                f"--ignore={known} of what uses a model"
            )
        raise UserError(f"{folder}: {error}{advice}") from error
    except (LookupError, ArithmeticError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / folders.CONFIG} is not complete: {error!r}"
        ) from error
    except ValueError as error:  # of a number that is none
        raise UserError(f"{folder / folders.CONFIG}: {error}") from error


def _with_head(
    folder: Path, huggingface: types.ModuleType, model: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Unties the head of a model whose weights are there and have another one."""
    untied = getattr(huggingface, "UNTIED", {})
    if untied.items() <= model.items() or not folders.has_weights(folder):
        return model
    if head := other_head(folder, huggingface.tensors(model)):
        warn(
            f"{folder / folders.CONFIG} ties the head to the embedding, but {head} has "
            "other values: it is not tied, as in transformers 5"
        )
        return {**model, **untied}
    return model


def _read(
    huggingface: types.ModuleType, content: dict[str, Any], ignored: list[str]
) -> Mapping[str, Any]:
    """Returns what a map reads, without unknown keys that are to be ignored."""
    for _ in ignored:
        try:
            return huggingface.read_config(content)
        except UserError as error:
            if (key := getattr(error, "unknown_key", "")) not in ignored:
                raise
            content = _without(content, key)
    return huggingface.read_config(content)


def _without(content: dict[str, Any], key: str) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    if rest and key not in content:
        return content | {first: _without(content[first], rest)}
    return {name: value for name, value in content.items() if name != key}


def _recorded(workdir: Path, source: str) -> dict[str, Any] | None:
    """Returns the `model.*` keys of the run in a folder, if from the same source."""
    try:
        model = read_json(workdir / "config.json")["model"]
        if model.pop(FROM, None) == source:
            model.pop(IGNORE, None)
            return model
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # no run, or one that is reported when it is resumed
    return None


def _set(group: ConfigDict, key: str, value: Any) -> None:
    if isinstance(group.get(key), float) and type(value) is int:
        value = float(value)
    if isinstance(value, list):  # from JSON
        value = tuple(value)
    with group.ignore_type():
        group[key] = value


# The weights.


def find_map(
    config: ConfigDict, huggingface: types.ModuleType | None, recipe: str, path: Path
) -> dict[str, FileTensor] | None:
    """Returns where the arrays of a model lie in the Hugging Face folder ``path``.

    Returns:
      As for ``load_safetensors``; None if ``path`` is no Hugging Face folder.

    Raises:
      UserError: The folder holds another model than the config's, or the recipe has no
        map.
    """
    if not folders.is_huggingface(path):
        return None
    required = require_map(huggingface, recipe, f"{path} is a Hugging Face folder")
    theirs = read_architecture(path, required, config.model[IGNORE])
    model = model_of(config.to_dict())
    source = config.model[FROM]
    if not source or cached_path(source).resolve() != path.resolve():
        ours = required.read_config(required.write_config(model))
        differences = [
            f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
            for key in {**theirs, **ours}
            if key not in _FREE and not _equal(theirs.get(key), ours.get(key))
        ]
        if differences:
            raise UserError(
                f"{path / folders.CONFIG} is of another model: "
                f"{some_of(differences, '; ')}: --config.{SOURCE}={path} takes the "
                "model from there"
            )
    return required.tensors(model)


def require_map(
    huggingface: types.ModuleType | None, recipe: str, why: str
) -> types.ModuleType:
    """Returns a recipe's map; a UserError if it has none."""
    if huggingface is None:
        raise UserError(
            f"{why}, and recipe {recipe} has no map of Hugging Face's names (an "
            "attribute `huggingface`): use one that has, such as llama.py"
        )
    return huggingface


def check_map(module: Any, file: Path | str, attribute: str) -> None:
    """Raises a UserError if a recipe's `huggingface` or `timm` lacks a function."""
    for name, arguments in FUNCTIONS.items():
        function = getattr(module, name, None)
        try:
            inspect.signature(function).bind(*arguments)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{attribute} in recipe {file} must be a module with "
                f"{name}({', '.join(arguments)}): {error}"
            ) from error


def model_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `model.*` keys of a config, for the functions of a map."""
    return {
        key: value
        for key, value in config["model"].items()
        if key not in (FROM, IGNORE)
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # files round them
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
