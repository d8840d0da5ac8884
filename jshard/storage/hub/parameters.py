"""The parameters of a pretrained model: from a checkpoint, or from safetensors.

A checkpoint is jshard's, or one that another program wrote with Orbax.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.settings.state import TrainState
from jshard.sharding.update import counts
from jshard.storage.checkpoint import frozen, metadata, spike_memory
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.orbax.folder import is_orbax, open_orbax
from jshard.storage.checkpoint.orbax.matching import OrbaxMatch, match
from jshard.storage.checkpoint.restore import find_step
from jshard.storage.checkpoint.step_folders import CHECKPOINTS, find_steps
from jshard.storage.checkpoint.stored_arrays import load_parameters, match_parameters
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.safetensors_read import (
    check_safetensors,
    is_safetensors,
    load_safetensors,
)
from jshard.storage.hub.tied_heads import other_head
from jshard.system.errors import UserError

# How the names of what is read begin, but for frozen parameters.
_BESIDE_FROZEN = ("params.", "model_state.", "opt_state.", "ema.")


@dataclasses.dataclass(frozen=True)
class ParameterSource:
    """What parameters are read from, as ``find_parameters`` found it.

    Attributes:
      path: A verified step's folder, a checkpoint of Orbax's, or safetensors.
      tensors: As for ``load_safetensors``.
      optimizer: Whether the optimizer state and the averages are read as well. If not,
        averages start from the parameters.
      orbax: What is read from a checkpoint of Orbax's, which has no averages.
    """

    path: Path
    tensors: Mapping[str, FileTensor] | None = None
    optimizer: bool = False
    orbax: OrbaxMatch | None = None

    @property
    def is_safetensors(self) -> bool:
        """Whether these are safetensors, and no checkpoint."""
        return self.tensors is not None or is_safetensors(self.path)


def find_parameters(
    path: Path,
    state: TrainState,
    *,
    tensors: Mapping[str, FileTensor] | None = None,
    optimizer: bool = False,
) -> ParameterSource:
    """Finds and checks what ``start_from`` reads, without reading any values.

    The arguments are those of ``ParameterSource``; the state may be abstract.

    Raises:
      UserError: The source is of another model or optimizer; the message lists the
        first differences. Or averages cannot go on, as the optimizer does not count
        its updates.
    """
    source = ParameterSource(path, tensors, optimizer)
    if source.is_safetensors:
        if optimizer:
            raise UserError(
                f"{path} holds safetensors, which have no optimizer state: leave out "
                "checkpoint.restore_optimizer"
            )
        check_safetensors(path, state, tensors)
        if tensors and (head := other_head(path, tensors)):
            raise UserError(
                f"{path}: {head} is not the embedding, to which the model here ties "
                "its head: of GPT-2 and Llama set --config.model.tied=False; another "
                "cannot have it, so remove the tensor"
            )
        return source
    if is_orbax(path) and not find_steps(path / CHECKPOINTS):
        found = match(open_orbax(path.absolute()), state, optimizer=optimizer)
        return of_orbax(found, optimizer)
    averages = optimizer and state.ema is not None
    if averages and jax.eval_shape(counts.updates, state.opt_state) is None:
        raise UserError(
            "checkpoint.restore_optimizer: averages (policy.ema_decay) go on by the "
            "optimizer's count of its updates, and this one keeps none: leave out one "
            "of the two keys, or give both runs' optimizer its rate as a schedule, "
            "optax.constant_schedule(...), which counts"
        )
    folder = find_step(path)
    stored = metadata.read(folder)["arrays"]
    if optimizer and (said := spike_memory.as_saved(state, stored)[2]):
        raise UserError(
            f"checkpoint.restore_optimizer: checkpoint {shown(folder)} {said}: set "
            "optimizer.skip_spikes and spike_window as they were there, or leave out "
            "checkpoint.restore_optimizer"
        )
    targets, sources = match_parameters(folder, state, optimizer)
    exact = metadata.exact_by_name(state)
    metadata.check_wanted(
        folder,
        {key: exact[name] for key, (name, _) in targets.items()},
        {key: entry for key, (_, entry) in sources.items()},
    )
    return dataclasses.replace(source, path=folder)


def start_from(
    source: ParameterSource,
    abstract: TrainState,
    initial_state: Callable[[nnx.State], TrainState],
) -> TrainState:
    """Starts a state from another run's parameters, or from safetensors files.

    Parameters are matched by name, whether they are trained or frozen in either run.
    Adapters (``nnx.LoRAParam``) that the source has not keep their initial values.
    Other model state (batch statistics) is read too, random streams are not. Frozen
    parameters are read and never initialised: they may be too large for the devices
    before they are in 4 bits.

    Args:
      source: From ``find_parameters``.
      abstract: The state.
      initial_state: Makes it of frozen parameters that have been read; the arrays that
        are replaced are deleted.

    Returns:
      The state with those values and an unchanged step.
    """
    state = initial_state(read_frozen(source, abstract).frozen)
    state = metadata.replace_arrays(state, _load(source, state, _BESIDE_FROZEN))
    has_averages = source.optimizer and source.orbax is None
    return state if has_averages else _start_averages(state)


def of_orbax(found: OrbaxMatch, optimizer: bool) -> ParameterSource:
    """Returns the source that a checkpoint of Orbax's is, as ``match`` found it."""
    return ParameterSource(found.checkpoint.path, optimizer=optimizer, orbax=found)


def read_frozen(source: ParameterSource, abstract: TrainState) -> TrainState:
    """Returns an abstract state with its frozen parameters read."""
    return metadata.replace_arrays(abstract, _load(source, abstract, frozen.PREFIX))


def _load(
    source: ParameterSource, state: TrainState, only: str | tuple[str, ...]
) -> dict[str, jax.Array]:
    if source.is_safetensors:
        return load_safetensors(source.path, state, source.tensors, only=only)
    if source.orbax is not None:
        return source.orbax.load(state, only)
    return load_parameters(source.path, state, optimizer=source.optimizer, only=only)


def _start_averages(state: TrainState) -> TrainState:
    """Sets the averages of a state, if it has any, to its parameters."""
    if state.ema is None:
        return state

    def start(average: jax.Array, param: jax.Array) -> jax.Array:
        dtype, sharding = average.dtype, average.sharding
        average.delete()
        # Either may be in host memory. Copied, because a step donates both buffers.
        on_device = jax.device_put(param, jax.memory.Space.Device)
        return jax.device_put(jnp.array(on_device, dtype, copy=True), sharding)

    averages = jax.tree.map(start, state.ema, state.params)
    return dataclasses.replace(state, ema=averages)
