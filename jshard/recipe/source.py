"""Where parameters come from: of a run beside its checkpoints, or of your own loop."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jshard.recipe.build import Job
from jshard.recipe.model_map import find_map, model_of, require_map
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.sharding.update import counts
from jshard.storage.checkpoint import frozen
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.buckets.mirror import on_disk
from jshard.storage.checkpoint.orbax.folder import is_orbax, open_orbax
from jshard.storage.checkpoint.orbax.matching import match
from jshard.storage.checkpoint.restore import restore_state
from jshard.storage.hub import peft
from jshard.storage.hub.adapters import reading
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.huggingface_folder import is_somewhere, model_path
from jshard.storage.hub.online.download import local_path
from jshard.storage.hub.online.names import parse
from jshard.storage.hub.parameters import (
    ParameterSource,
    find_parameters,
    of_orbax,
    read_frozen,
    start_from,
)
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError, warn


@dataclasses.dataclass(frozen=True)
class Source:
    """What parameters are read from, found and checked before anything is written.

    Attributes:
      parameters: Of a pretrained model; None starts with initial values.
      name: Its name on the Hugging Face Hub, with the commit; "" if it has none.
      adapters: A folder of PEFT's, if the adapters are read from one.
      checkpoint: The run's own checkpoint, if it is resumed: only the parameters that
        it leaves out are read.
    """

    parameters: ParameterSource | None
    name: str = ""
    adapters: Path | None = None
    checkpoint: Path | None = None

    @property
    def frozen_from(self) -> Path | str | None:
        """A step's folder, safetensors or a name, if parameters are read from one."""
        return self.parameters and (self.name or self.parameters.path)

    def restore(self, abstract_state: TrainState) -> TrainState:
        """Returns the state of the run's checkpoint."""
        assert self.checkpoint is not None
        if self.parameters is not None:
            abstract_state = read_frozen(self.parameters, abstract_state)
        return restore_state(self.checkpoint, abstract_state)

    def start(self, job: Job, abstract_state: TrainState) -> TrainState:
        """Returns the state of a new run."""
        if self.parameters is None:
            state = job.initial_state()
        else:
            state = start_from(self.parameters, abstract_state, job.initial_state)
        if self.adapters is not None:
            state = reading.read_adapters(
                self.adapters, state, _map_of(job, self.adapters)
            )
        return state

    def message(self, state: TrainState) -> str:
        """Says what the state of a new run starts from; "" for initial values."""
        read = [path for path in (self.frozen_from, self.adapters) if path]
        found = " and ".join(shown(x) if isinstance(x, Path) else x for x in read)
        text = f"starting from the parameters of {found}" if found else ""
        orbax = self.parameters and self.parameters.orbax
        if orbax:
            text += f" ({orbax.note})"
        if self.parameters is not None and self.parameters.optimizer:
            made = jax.jit(counts.updates)(state.opt_state)
            after = "" if made is None else f" after {made} updates"
            averages = "" if state.ema is None or orbax else " and averages"
            text += f", and from its optimizer{after}: schedules{averages} go on"
        return text


def find_source(
    job: Job, abstract_state: TrainState, checkpoint: Path | None = None
) -> Source:
    """Finds what a run's parameters are read from, and checks names and shapes.

    A new run reads what `checkpoint.restore` names, and adapters from
    `checkpoint.adapters`. A checkpoint may leave out what is frozen, which is where the
    checkpoint says, or, if it has moved since, where `checkpoint.restore` says.

    Raises:
      UserError: Something is missing, or of another model.
    """
    recipe, given = job.configured.recipe, job.configured.settings.checkpoint
    text = given.restore
    if checkpoint is not None:
        recorded = frozen.source_of(checkpoint)
        if recorded and not text and not is_somewhere(recorded):
            raise UserError(
                f"{checkpoint} has the trained parameters alone, and {recorded}, with "
                "the others, does not exist: give the folder that has them with "
                "--config.checkpoint.restore=DIR"
            )
        text = recorded and (text or recorded)
    parameters, name = None, ""
    if text:
        path, name = model_path(text), str(parse(text) or "")
        parameters = find_parameters(
            path,
            abstract_state,
            tensors=find_map(
                job.configured.config, recipe.map_of(path), recipe.name, path
            ),
            optimizer=given.restore_optimizer and checkpoint is None,
        )
    adapters = None
    if given.adapters and checkpoint is None:
        adapters = local_path(given.adapters, (peft.CONFIG, peft.TENSORS))
        reading.check_adapters(adapters, abstract_state, _map_of(job, adapters))
        reading.check_base(adapters, parse(text) if text else None)
    return Source(parameters, name, adapters, checkpoint)


def _map_of(job: Job, adapters: Path) -> Mapping[str, FileTensor]:
    """Returns where Hugging Face's files of the model keep its arrays."""
    why = f"{adapters} holds adapters for a model of Hugging Face"
    recipe = job.configured.recipe
    required = require_map(recipe.huggingface, recipe.name, why)
    return required.tensors(model_of(job.configured.recorded))


def init_from(
    folder: Path | str,
    fsdp: FSDP,
    make_model: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    *,
    tensors: Mapping[str, FileTensor] | None = None,
    wrt: Any = nnx.Param,
    seed: int = 0,
) -> TrainState:
    """Returns what ``fsdp.init`` does, with parameters from files, in a loop of yours.

    Each process reads its devices' slices. Adapters start as they are made.

    Args:
      folder: A folder of Hugging Face's, safetensors, or a run or its checkpoint.
      fsdp: What makes the state.
      make_model: As for ``fsdp.init``.
      optimizer: Likewise.
      tensors: Where the files keep each array, by its name: ``tensors(keys)`` of
        ``jshard.models.llama_huggingface``, for example, with the keys that its
        ``read_config`` returns of a config.json. None if they have the model's names.
      wrt: As for ``fsdp.init``.
      seed: Likewise.

    Raises:
      UserError: The files are of another model; the message lists the differences.
    """
    abstract = fsdp.abstract_state(make_model, optimizer, wrt=wrt)
    source = find_parameters(Path(folder), abstract, tensors=tensors)
    make = functools.partial(fsdp.init, make_model, optimizer, seed, wrt)
    return start_from(source, abstract, make)


def restore_orbax(
    folder: str | Path,
    fsdp: FSDP,
    make_model: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    *,
    wrt: Any = nnx.Param,
    seed: int = 0,
    step: int | None = None,
    restore_optimizer: bool = True,
    params_at: str | None = None,
    optimizer_at: str | None = None,
) -> TrainState:
    """Continues from a checkpoint that another program wrote with Orbax.

    Arrays are found by their paths and read into the shards of any mesh. The parameters
    are the subtree that contains the paths of all of them, and so is the state of the
    optimizer, an ``optax`` tree or that of an ``nnx.Optimizer``. Batch statistics and
    random streams are read too, averages (``Policy.ema_decay``) start from the
    parameters. A warning lists what is not read.

    Args:
      folder: Of the checkpoint, or of a CheckpointManager; a path, or a URL in a
        bucket (s3://, gs://).
      fsdp: Shards the state.
      make_model: As for ``fsdp.init``.
      optimizer: The transformation that the checkpoint's was made with.
      wrt: As for ``fsdp.init``.
      seed: Of what the checkpoint lacks: adapters, random streams.
      step: Which one, of a CheckpointManager's; None takes the newest.
      restore_optimizer: Whether to read the optimizer's state, random streams and the
        number of steps. If not, they start anew.
      params_at: Keys with dots, such as "model", where several places fit.
      optimizer_at: The same, of the optimizer's state.

    Returns:
      The state, with the checkpoint's number of steps: beside the optimizer's state, or
      else in the folder's name.

    Raises:
      UserError: It is not Orbax's or not complete, or of another model or optimizer;
        the message lists what is missing and what is unexpected.
    """
    check_path("restore_orbax: folder", folder, bucket=True)
    path = on_disk(folder).absolute()
    if not is_orbax(path):
        what = "holds no checkpoint of Orbax's" if path.exists() else "does not exist"
        raise UserError(f"restore_orbax: {folder} {what}")
    abstract = fsdp.abstract_state(make_model, optimizer, wrt)
    found = match(
        open_orbax(path, step),
        abstract,
        optimizer=restore_optimizer,
        params_at=params_at,
        optimizer_at=optimizer_at,
    )
    logging.getLogger("jshard").info("%s: %s", found.checkpoint, found.said)
    if found.left:
        warn(f"{found.checkpoint}: not read: {found.left}")
    state = start_from(
        of_orbax(found, restore_optimizer),
        abstract,
        lambda frozen: fsdp.init(make_model, optimizer, seed, wrt, frozen),
    )
    steps = np.int32(found.step or 0)
    return dataclasses.replace(state, step=jax.device_put(steps, state.step.sharding))
