"""A trained model to use: from a run of jshard, or from a Hugging Face folder."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from jshard.data.tokenizers.tokenizer import PYTHON, Tokenizer, load_tokenizer
from jshard.inference.trained.huggingface_export import find_recipe_of
from jshard.recipe import contract
from jshard.recipe.build import Job, job_on
from jshard.recipe.config.text_keys import TextKeys
from jshard.recipe.configured import Configured, configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config, recorded_config
from jshard.recipe.model_map import IGNORED, SOURCE, find_map
from jshard.recipe.source import find_source
from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.mesh import make_mesh
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import Precision, own_dtype, set_compute_dtype
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.storage.checkpoint import frozen, metadata
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.restore import find_step
from jshard.storage.hub.huggingface_folder import (
    is_huggingface,
    is_somewhere,
    model_path,
    read_config,
)
from jshard.storage.hub.online.download import cached_path
from jshard.storage.hub.parameters import find_parameters, start_from
from jshard.system.errors import UserError

# Recipes with the models of Hugging Face, by architecture, or by type where there is
# none; llama.py has the rest.
_RECIPES = {
    "GPT2LMHeadModel": "gpt.py",
    "GPT2Model": "gpt.py",
    "T5ForConditionalGeneration": "t5.py",
    "T5WithLMHeadModel": "t5.py",
    "gpt2": "gpt.py",
    "t5": "t5.py",
}
_OTHERS = "llama.py:3-8b"


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model whose weights have not been read yet.

    Attributes:
      path: A checkpoint of a run, or a Hugging Face folder.
      configured: Its recipe, with the config that the run or the folder says.
      dtype: Of the weights and of the computation; None is the run's own.
      ema: Whether the weights are the run's averages; None if it has none.
      base: What the run's frozen parameters are read from, if they have moved.
    """

    path: Path
    configured: Configured
    dtype: str | None
    ema: bool | None = None
    base: Path | None = None

    def __str__(self) -> str:
        of_averages = {
            None: "",
            False: ", as trained; --ema takes its averages",
            True: ", its averages",
        }
        return f"{shown(self.path)}{of_averages[self.ema]}"

    @property
    def text(self) -> TextKeys:
        """What the recipe's keys say of the model's text."""
        return self.configured.text

    def tokenizer(self, given: Path | None = None) -> Tokenizer:
        """Returns the model's tokenizer, or the given one.

        Raises:
          UserError: It is missing, or has more tokens than the model.
        """
        if given is not None:
            return load_tokenizer(given, self.text.vocab_size)
        if is_huggingface(self.path):
            return load_tokenizer(self.path, self.text.vocab_size)
        own = self.text.tokenizer or ""
        named = own in ("", PYTHON)
        if self.base is not None and not named and not cached_path(own).exists():
            own = self.base  # it was beside the weights that have moved
        return load_tokenizer(own, self.text.vocab_size)

    def abstract(self) -> nnx.Module:
        """Returns the model without its weights."""
        fsdp, state = self._abstract
        return fsdp.model(state)

    def bytes(self) -> int:
        """Returns the size of the weights, without making any."""
        _, state = self._abstract
        leaves = jax.tree.leaves(state.model_arrays)
        return sum(x.size * x.dtype.itemsize for x in leaves)

    @functools.cached_property
    def _abstract(self) -> tuple[FSDP, TrainState]:
        job = self._job(jax.devices()[:1])
        return job.fsdp, job.abstract_state()

    def load(self, devices: Sequence[Any]) -> tuple[FSDP, TrainState]:
        """Reads the weights, sharded over the devices.

        Raises:
          UserError: They are missing, damaged or of another model.
        """
        job = self._job(devices)
        abstract_state = job.abstract_state()
        if self._needs_whole_state:
            source = find_source(job, abstract_state, self.path)
            state = source.restore(abstract_state)
            if self.ema:
                state = state.with_ema_params()
            # What is left is as if there had never been an optimizer.
            rest: dict[str, Any] = {"opt_state": (), "ema": None, "loss_scale": None}
            return job.fsdp, dataclasses.replace(state, **rest)
        recipe, config = self.configured.recipe, self.configured.config
        tensors = find_map(config, recipe.map_of(self.path), recipe.name, self.path)
        found = find_parameters(self.path, abstract_state, tensors=tensors)
        return job.fsdp, start_from(found, abstract_state, job.initial_state)

    @own_mesh()
    def load_whole(self, device: Any) -> nnx.Module:
        """Reads the weights to one device; returns the model in eval mode.

        Before ``FSDP.from_model``, ``model.train()`` lets it drop values again.
        """
        fsdp, state = self.load([device])
        model = fsdp.model(state)
        model.eval()
        for path, module in nnx.iter_modules(model):
            precision = fsdp.policy.precision_at(path, own_dtype(module))
            set_compute_dtype(module, precision.compute)
        return model

    @property
    def _needs_whole_state(self) -> bool:
        """Returns whether the training state is read, and not its parameters alone.

        A checkpoint of adapters is small, and names the rest of the model. Averages are
        read beside the parameters.
        """
        if is_huggingface(self.path):
            return False
        return bool(self.ema) or frozen.source_of(self.path) is not None

    def _job(self, devices: Sequence[Any]) -> Job:
        """Returns a job that computes as the run does, in its dtypes."""
        whole, of = self._needs_whole_state, self.configured
        policy = self._policy(whole)
        fsdp = FSDP(make_mesh(devices=devices), policy, units=of.units())
        optimizer = optax.identity()
        if whole:
            optimizer = contract.make_optimizer(of.recipe.make_optimizer, of.config)
        return job_on(fsdp, of, optimizer)

    def _policy(self, whole: bool) -> Policy:
        """Returns the run's dtypes, and if ``whole`` what its state consists of."""
        of_training = {"policy.remat": "full", "policy.accumulate": 1}  # maybe "fit"
        own = self.configured.with_values(of_training).policy

        def dtypes(precision: Precision) -> Precision:
            param, compute = precision.param, precision.compute
            return Precision(
                self.dtype or param,
                compute=self.dtype or compute,
                base=precision.base,
            )

        overrides = {
            pattern: {"precision": dtypes(fields.get("precision", own.precision))}
            for pattern, fields in own.overrides.items()
        }
        return Policy(
            precision=dtypes(own.precision),
            overrides=overrides,
            ema_decay=own.ema_decay if whole else None,
            loss_scale=whole and own.loss_scale,
        )


@contextmanager
def open_model(
    path: str | Path,
    recipe: str | None = None,
    dtype: str | None = None,
    *,
    ema: bool = False,
    base: Path | None = None,
    ignored: str = "",
    step: str | None = None,
) -> Iterator[TrainedModel]:
    """Finds a trained model; use it inside the block, like ``open_recipe``.

    Args:
      path: A run's folder, which may end in @best or @STEP, a folder of checkpoints,
        one checkpoint, or a Hugging Face folder or name.
      recipe: The recipe, if it is not where the run says, or for a Hugging Face folder
        one with another map.
      dtype: Of the weights and of the computation; by default the run's own, and
        float32 for a Hugging Face folder.
      ema: Whether to take the averages of the run's parameters.
      base: What the run's frozen parameters are read from, if they have moved.
      ignored: Unknown keys of a Hugging Face folder's config.json that change nothing,
        like "a,b".
      step: Which checkpoint of a run: best, newest or a number.

    Raises:
      UserError: There is no model, or it is of an unknown architecture, or has no
        averages.
    """
    path = model_path(path, step)
    if is_huggingface(path):
        _check_averages(path, not ema)
        _check_base(path, None, base)
        content = read_config(path)
        names = content.get("architectures") or content.get("model_type")
        (architecture, *_) = names if isinstance(names, list) else [names]
        found = find_recipe(recipe or _RECIPES.get(str(architecture), _OTHERS))
        with open_recipe(found) as opened:
            config = make_config(opened, {SOURCE: str(path), IGNORED: ignored})
            yield TrainedModel(path, configure(opened, config), dtype or "float32")
        return
    path = find_step(path)
    about = metadata.read(path)
    if not about["config"]:
        raise UserError(
            f"checkpoint {path} has no config of a recipe, which says what the model is"
        )
    has_averages = any(name.startswith("ema.") for name in about["arrays"])
    _check_averages(path, has_averages or not ema)
    _check_base(path, frozen.source_of(path), base)
    found = find_recipe_of(path, about["config"], recipe)
    with open_recipe(found) as opened:
        # What the run was given may be relative to another folder.
        elsewhere = {"checkpoint.restore": str(base or "")}
        config = recorded_config(opened, about["config"], path, elsewhere)
        averages = ema if has_averages else None
        yield TrainedModel(path, configure(opened, config), dtype, averages, base)


def _check_base(path: Path, recorded: str | None, base: Path | None) -> None:
    """Raises a UserError if parameters that a checkpoint lacks are not there."""
    if recorded is None and base is not None:
        raise UserError(f"--base={base}: {path} has all of its weights")
    found = base or recorded
    if found is not None and not is_somewhere(found):
        raise UserError(
            f"{path} has the trained weights alone, and {found}, with the others, does "
            "not exist: give the folder that has them with --base=DIR"
        )


def _check_averages(path: Path, fine: bool) -> None:
    if not fine:
        raise UserError(
            f"--ema: {path} has no averages; train with --config.policy.ema_decay="
            "0.999, for example"
        )
