"""Where the parameters of a run come from, besides its own checkpoints."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from jshard.recipe.build import Job
from jshard.recipe.model_map import find_map, model_of, require_map
from jshard.sharding.settings.state import TrainState
from jshard.sharding.update import counts
from jshard.storage.checkpoint import frozen
from jshard.storage.checkpoint.buckets.arrays import shown
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
    read_frozen,
    start_from,
)
from jshard.system.errors import UserError


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
