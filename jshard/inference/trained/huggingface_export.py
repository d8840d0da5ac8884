"""What a Hugging Face folder needs besides tensors, from a run and its recipe."""

import json
import types
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from jshard.recipe.config.run_config import flatten
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.model_map import SOURCE, model_of, require_map
from jshard.storage.hub import huggingface_folder as folders
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.merged_adapters import adapters
from jshard.storage.hub.online.download import cached_path
from jshard.system.cli.paths import path_problem
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class MappedModel(NamedTuple):
    """A run's model as Hugging Face has it.

    Attributes:
      tensors: Where each array lies in the files, by tensor name without stacking.
      config: The content of config.json.
      sources: Folders that may have its tokenizer and its generation config, the first
        ones first.
      heads: What a tied table's head is called in the files, if only the table has an
        adapter, so that they are no longer the same.
    """

    tensors: Mapping[str, FileTensor]
    config: Mapping[str, Any]
    sources: list[Path]
    heads: Mapping[str, str]


def find_model(
    step: Path, about: Mapping[str, Any], given: str | None, format: str
) -> MappedModel:
    """Finds the recipe of a checkpoint's run, and asks its map.

    The user may have given another recipe than the run's.

    Raises:
      UserError: The run's recipe is gone, or has no map.
    """
    config = about["config"]
    if not isinstance(config.get("model"), dict):
        raise UserError(
            f"--format={format}: checkpoint {step} has no config of a recipe, which "
            "says what the model is"
        )
    with open_recipe(find_recipe_of(step, config, given)) as recipe:
        if format == "timm":
            mapped = recipe.require_timm("--format=timm needs names")
        else:
            why = "--format=huggingface needs names"
            mapped = require_map(recipe.huggingface, recipe.name, why)
        model = model_of(config)
        try:
            tensors, written = mapped.tensors(model), mapped.write_config(model)
            heads = {}
            if format == "huggingface" and written.get("tie_word_embeddings", True):
                heads = _heads_apart(mapped, about, tensors)
            if heads:
                written = mapped.write_config(model | {"tied": False})
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"checkpoint {step}: its config.model is not one of {recipe.name}: "
                f"{error!r}"
            ) from error
        return MappedModel(tensors, written, _sources(config), heads)


def _heads_apart(
    mapped: types.ModuleType,
    about: Mapping[str, Any],
    tensors: Mapping[str, FileTensor],
) -> dict[str, str]:
    """Returns the heads that merged adapters part from their tables.

    An adapter of a table changes what is looked up, and not the head's product.

    Raises:
      UserError: The map does not say what a head of its own is called.
    """
    tables = [f"{path}.embedding" for path in adapters(about)]
    tables = [table for table in tables if table in tensors]
    apart = getattr(mapped, "TIED_HEAD", None)
    if tables and apart is None:
        raise UserError(
            f"--format=huggingface: {tables[0]} has an adapter, and the head, which is "
            "tied to it, has none: merged, they are no longer the same; export the "
            "adapters alone with --format=peft"
        )
    return dict([apart]) if apart and apart[0] in tables else {}


def find_recipe_of(step: Path, config: Mapping[str, Any], given: str | None) -> str:
    """Finds a run's recipe: as given, as noted by the run, or by name.

    Raises:
      UserError: There is none.
    """
    if given is not None:
        return find_recipe(given)
    try:
        notes = read_json(step.parents[1] / "notes.json")
        return find_recipe(notes["recipe"])
    except (OSError, ValueError, LookupError, TypeError):  # a UserError is a ValueError
        pass  # the checkpoint was moved, or the recipe
    try:
        return find_recipe(str(config["recipe"]))
    except (UserError, LookupError) as error:
        raise UserError(
            f"the recipe of {step} is needed and not where it was: give "
            f"--config=RECIPE ({error})"
        ) from error


def _sources(config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that the run had its tokenizer and its weights from."""
    flat = flatten(config)
    given = map(flat.get, ("data.tokenizer", "checkpoint.restore", SOURCE))
    texts = [text for text in given if isinstance(text, str) and text]
    texts = [text for text in texts if not path_problem(text, hub=True)]
    paths = [cached_path(text) for text in texts]
    found = [path.parent if path.is_file() else path for path in paths]
    return list(dict.fromkeys(found))  # often the same


def write_companions(folder: Path, model: MappedModel, dtypes: Set[str]) -> list[str]:
    """Writes config.json, and copies the tokenizer and the generation config.

    `dtypes` are those of the tensors in the folder.

    Returns:
      What to tell the user.
    """
    content = dict(model.config)
    if len(dtypes) == 1:
        (dtype,) = dtypes
        content |= {"dtype": dtype, "torch_dtype": dtype}  # of transformers 5, and 4
    for source in model.sources:
        for key, value in _token_ids(source).items():
            content.setdefault(key, value)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (folder / folders.CONFIG).write_text(text, encoding="utf-8")
    notes = []
    for what, names in (
        ("tokenizer", folders.TOKENIZER),
        ("generation config", (folders.GENERATION,)),
    ):
        for source in model.sources:
            if folders.copy_files(names, source, folder):
                notes.append(f"{what} of {source}")
                break
        else:
            places = ", ".join(map(str, model.sources))
            notes.append(f"no {what}{' in ' * bool(places)}{places}")
    return notes


def _token_ids(source: Path) -> dict[str, Any]:
    """Returns the ids of special tokens in a folder's config.json."""
    try:
        content = folders.read_config(source)
    except UserError:
        return {}
    return {key: content[key] for key in _TOKEN_IDS if key in content}
