"""A recipe: the functions that say what to train."""

import dataclasses
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.contract import ARGUMENTS, check_signature
from jshard.recipe.model_map import check_map, declare_source, hide_source
from jshard.recipe.recipe_path import join_path, short_name
from jshard.storage.hub.huggingface_folder import is_timm
from jshard.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The functions of a recipe file.

    A recipe for several models, like the packaged `llama.py`, distinguishes them by an
    argument, as ml_collections' `config_flags` do: `--config=llama.py:3-8b` calls
    `get_config("3-8b")`, and `--config=llama.py` calls `get_config()`. Its
    `get_config(size: str = "")` raises a `jshard.UserError` that lists the known
    arguments if it gets another. The other functions see the config alone, so whatever
    follows from the argument belongs there.

    Attributes:
      file: The recipe's file; None if it was put together in Python.
      argument: What follows the file and ":" in `--config`; None if nothing does.
      get_config: `get_config()`, with the argument if there is one, returns the
        `ConfigDict` of every number and name.
      make_model: `make_model(config, rngs)` returns a Flax NNX model.
      make_optimizer: `make_optimizer(config)` returns an optax transformation.
      loss_fn: `loss_fn(model, batch)`, maybe with `rngs`, returns a `Mean`, or whatever
        else `FSDP.train_step` accepts.
      make_data: `make_data(config, split)` returns a `grain.MapDataset` of dicts of
        NumPy arrays, or whatever else `jshard.data.dataset.as_dataset` accepts;
        `split` is "train" or "validation".
      learning_rate: Optional; `learning_rate(config)` returns the optax schedule to
        log beside the loss.
      references: Optional; `references(config)` returns named losses, in nats, to show
        beside the evaluation loss. Only process 0 calls it.
      flops_per_token: Optional; `flops_per_token(config)` returns the model FLOPs of
        one token, forward and backward, for MFU.
      sample: Optional; `sample(config)` returns `(generate, prompts, decode)`:
        `generate(model, prompts)` returns tokens, and `decode(tokens[0])` their text.
        It may return None for no sample.
      predict_fn: Optional; `predict_fn(model, batch)` returns what `Trainer.predict`
        computes, arrays with a row for each example.
      precompute: Optional; `precompute(config)` returns `fn(model, batch)`, which is
        called once for each example with the parameters that the run starts from, and
        returns a dict of arrays, a row for each example. From then on batches have
        these in place of what `make_data` put under their names. It may return None.
      sample_images: Optional; `sample_images(config)` returns `(predict, batch,
        caption)` for pictures in the report: `predict(model, batch)` returns arrays, a
        row for each of the pictures in `batch["image"]`, which are uint8 or floating in
        [0, 1], and `caption(i, row)` the text below picture i. It may return None.
      units: Optional; `units(config)` returns the module types that become Units, as
        in `jshard.FSDP(units=...)`, for a model without Units of its own.
      tensor_splits: Optional; `tensor_splits(config)` returns what `mesh.tensor` splits
        of modules by path, as in `jshard.FSDP(tensor_splits=...)`.
      sequences: Optional; `sequences(config)` returns the names of a batch's arrays
        whose second dimension is the sequence, as in `jshard.FSDP(sequences=...)`.
      trainable: Optional; `trainable(config)` returns the NNX filter of the parameters
        to train, as `wrt` of `jshard.FSDP.init`; by default all `nnx.Param`.
      tracker: Optional; `tracker(config)` begins a run in a service of the user's, and
        returns a `jshard.training.Tracker`. Only process 0 calls it.
      huggingface: Optional; the model's map to the files of Hugging Face, a module as
        `jshard.recipe.model_map` describes. It adds the key `model.from`.
      timm: Optional; likewise the model's map to the files of timm.
    """

    file: Path | None
    argument: str | None
    get_config: Callable[[], ConfigDict]
    make_model: Callable[..., Any]
    make_optimizer: Callable[[ConfigDict], Any]
    loss_fn: Callable[..., Any]
    make_data: Callable[[ConfigDict, str], Any]
    learning_rate: Callable[[ConfigDict], Callable[[int], Any]] | None = None
    references: Callable[[ConfigDict], dict[str, float]] | None = None
    flops_per_token: Callable[[ConfigDict], float] | None = None
    sample: Callable[[ConfigDict], tuple[Callable, Any, Callable] | None] | None = None
    predict_fn: Callable[..., Any] | None = None
    precompute: Callable[[ConfigDict], Any] | None = None
    sample_images: Callable[[ConfigDict], Any] | None = None
    units: Callable[[ConfigDict], Any] | None = None
    tensor_splits: Callable[[ConfigDict], Any] | None = None
    sequences: Callable[[ConfigDict], Any] | None = None
    trainable: Callable[[ConfigDict], Any] | None = None
    tracker: Callable[[ConfigDict], Any] | None = None
    huggingface: types.ModuleType | None = None
    timm: types.ModuleType | None = None

    def map_of(self, folder: Path) -> types.ModuleType | None:
        """Returns the map of a folder: timm's for timm's, else Hugging Face's.

        Raises:
          UserError: It is timm's, and there is no such map.
        """
        folder = folder.expanduser()
        if is_timm(folder):
            return self.require_timm(f"{folder} is a folder of timm's")
        return self.huggingface

    def require_timm(self, why: str) -> types.ModuleType:
        """Returns the map to timm's files; a UserError if there is none."""
        if self.timm is None:
            raise UserError(
                f"{why}, and recipe {self.name} has no map of timm's names (an "
                "attribute `timm`): use one that has, such as imagenet_regnet.py"
            )
        return self.timm

    @property
    def path(self) -> str:
        """The argument of `open_recipe`, like "/home/me/train/llama.py:3-8b"."""
        return join_path(str(self.file or "recipe"), self.argument)

    @property
    def name(self) -> str:
        """The path without folders and ".py", like "llama:3-8b"."""
        return short_name(self.path)


def recipe_of(module: Any, file: Path | None, argument: str | None = None) -> Recipe:
    """Makes a recipe of a module's functions.

    `get_config` is called with the argument, if there is one.

    Raises:
      UserError: A function is missing, or cannot be called as it is.
    """
    what, name = (f"recipe {file}", file.name) if file else ("the recipe", "the recipe")
    functions: dict[str, Any] = {}
    for key, arguments in ARGUMENTS.items():
        function = functions[key] = getattr(module, key, None)
        if function is None:
            if Recipe.__dataclass_fields__[key].default is dataclasses.MISSING:
                raise UserError(f"{what} lacks the function {key}()")
        elif not callable(function):
            raise UserError(f"{key} in {what} is not a function")
        elif key != "get_config":
            check_signature(function, f"{name}: {key}", arguments)
    get_config = functions["get_config"]
    given = () if argument is None else (argument,)
    try:
        check_signature(get_config, f"{name}: get_config", given)
    except UserError as error:
        usage = f"--config={name}{'' if given else ':ARGUMENT'}"
        raise UserError(f"{error}; use {usage}") from error
    functions["get_config"] = partial(get_config, *given)
    maps: dict[str, Any] = {
        key: getattr(module, key, None) for key in ("huggingface", "timm")
    }
    for key, found in maps.items():
        if found is not None:
            check_map(found, file or "in Python", key)
    if any(maps.values()):  # `model.from` is a key for jshard alone
        functions["get_config"] = declare_source(functions["get_config"])
        for key, arguments in ARGUMENTS.items():
            if functions[key] and "config" in arguments:
                functions[key] = hide_source(functions[key])
    return Recipe(file, argument, **functions, **maps)
