"""A trained model to use: from a run of jshard, or from a Hugging Face folder."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from jshard.checkpoint import frozen, metadata
from jshard.checkpoint.huggingface import is_huggingface, read_config
from jshard.checkpoint.restore import find_parameters, find_step, read_parameters
from jshard.cli.command import file_path
from jshard.errors import UserError
from jshard.fsdp import FSDP
from jshard.mesh import make_mesh
from jshard.policy import Policy
from jshard.precision import Precision, set_compute_dtype
from jshard.state import TrainState
from jshard.training import returns
from jshard.training.config.config import Config, complete
from jshard.training.config.policy import make_precision
from jshard.training.huggingface import SOURCE, find_map
from jshard.training.huggingface_export import find_recipe_of
from jshard.training.job import Job
from jshard.training.make_config import make_config
from jshard.training.recipe import Recipe, find_recipe, open_recipe
from jshard.training.run_folder.source import find_source
from jshard.training.tokenizer import Tokenizer, load_tokenizer

# Recipes with the models of Hugging Face, by architecture; llama.py has the rest.
_RECIPES = {"GPT2LMHeadModel": "gpt.py"}
_OTHERS = "llama.py:3-8b"


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model whose weights have not been read yet.

    Attributes:
      path: A checkpoint of a run, or a Hugging Face folder.
      recipe: Its recipe.
      config: The recipe's config, as the run or the folder says.
      dtype: Of the weights and of the computation; None is the run's own.
    """

    path: Path
    recipe: Recipe
    config: Config
    dtype: str | None

    def tokenizer(self, given: Path | None = None) -> Tokenizer:
        """Returns the model's tokenizer, or the given one.

        Raises:
          UserError: It is missing, or has more tokens than the model.
        """
        vocab_size = self.config.get("model", {}).get("vocab_size")
        if given is not None:
            return load_tokenizer(given, vocab_size)
        if is_huggingface(self.path):
            return load_tokenizer(self.path, vocab_size)
        return load_tokenizer(
            self.config.get("data", {}).get("tokenizer", ""), vocab_size
        )

    def bytes(self) -> int:
        """Returns the size of the weights, without making any."""
        job = self._job(jax.devices()[:1])
        state = jax.tree.leaves(job.abstract_state().model_arrays)
        return sum(x.size * x.dtype.itemsize for x in state)

    def load(self, devices: Sequence[Any]) -> tuple[FSDP, TrainState]:
        """Reads the weights, sharded over the devices.

        Raises:
          UserError: They are missing, damaged or of another model.
        """
        job = self._job(devices)
        abstract_state = job.abstract_state()
        if not is_huggingface(self.path) and frozen.source_of(self.path):
            source = find_source(job, abstract_state, self.path)
            return job.fsdp, source.restore(abstract_state)
        tensors = find_map(
            self.config, self.recipe.huggingface, self.recipe.name, self.path
        )
        path = find_parameters(self.path, abstract_state, tensors=tensors)
        return job.fsdp, read_parameters(path, job.initial_state(), tensors=tensors)

    def load_whole(self, device: Any) -> nnx.Module:
        """Reads the weights to one device; returns the model in eval mode."""
        fsdp, state = self.load([device])
        model = fsdp.model(state)
        model.eval()
        for _, module in nnx.iter_modules(model):
            set_compute_dtype(module, fsdp.policy.precision.compute)
        return model

    def _job(self, devices: Sequence[Any]) -> Job:
        """Returns a job that computes as the run does, without its optimizer."""
        recipe, config = self.recipe, self.config
        own = make_precision(config)
        param, compute = self.dtype or own.param, self.dtype or own.compute
        precision = Precision(param=param, compute=compute)
        fsdp = FSDP(
            make_mesh(devices=devices),
            Policy(precision=precision),
            units=recipe.units(config) if recipe.units else (),
        )
        optimizer = optax.identity()
        if not is_huggingface(self.path) and frozen.source_of(self.path):
            # A checkpoint of adapters is small, and read as a whole.
            optimizer = returns.make_optimizer(recipe.make_optimizer, config)
        return Job(
            recipe,
            config,
            fsdp,
            optimizer,
            partial(recipe.make_model, config),
            returns.trainable(recipe.trainable, config),
            fsdp.train_step(recipe.loss_fn, optimizer),
        )


@contextmanager
def open_model(
    path: Path, recipe: str | None = None, dtype: str | None = None
) -> Iterator[TrainedModel]:
    """Finds a trained model; use it inside the block, like ``open_recipe``.

    Args:
      path: A run's folder, a folder of checkpoints, one checkpoint, or a Hugging Face
        folder.
      recipe: The recipe, if it is not where the run says, or for a Hugging Face folder
        one with another map.
      dtype: Of the weights and of the computation; by default the run's own, and
        float32 for a Hugging Face folder.

    Raises:
      UserError: There is no model, or it is of an unknown architecture.
    """
    path = path.expanduser()
    if is_huggingface(path):
        (architecture, *_) = read_config(path).get("architectures") or [""]
        found = find_recipe(recipe or _RECIPES.get(architecture, _OTHERS))
        with open_recipe(found) as opened:
            config = make_config(opened, {SOURCE: str(path)})
            yield TrainedModel(path, opened, config, dtype or "float32")
        return
    step = find_step(path)
    about = metadata.read(step)
    if not about["config"]:
        raise UserError(
            f"checkpoint {step} has no config of a recipe, which says what the model is"
        )
    found = find_recipe_of(step, about["config"], recipe)
    with open_recipe(found) as opened:
        config = complete(opened.get_config(), opened.name)
        _take(config, about["config"])
        yield TrainedModel(step, opened, config, dtype)


def _take(config: Any, stored: Mapping[str, Any]) -> None:
    """Sets the keys of a recipe's config to the values that a run had."""
    with config.unlocked(), config.ignore_type():
        for name, value in stored.items():
            if name not in config:
                continue  # of an older jshard
            if isinstance(config[name], ConfigDict):
                _take(config[name], value)
            else:
                config[name] = tuple(value) if isinstance(value, list) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of commands that use a trained model."""
    parser.add_argument(
        "--model",
        metavar="RUN_OR_DIR",
        type=file_path,
        required=True,
        help="a run's folder, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        help="the model's recipe, if it is not where the run says",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE_OR_FOLDER",
        type=file_path,
        help="by default the run's, or that in the Hugging Face folder",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and computation; by default the run's own, and float32 for a "
        "Hugging Face folder",
    )
