"""The parameters of a pretrained model: from a checkpoint, or from safetensors.

A checkpoint is jshard's, or one that another program wrote with Orbax.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.sharding.update import counts
from jshard.storage.checkpoint import frozen, metadata
from jshard.storage.checkpoint.orbax.folder import is_orbax, open_orbax
from jshard.storage.checkpoint.orbax.matching import OrbaxMatch, match
from jshard.storage.checkpoint.restore import find_step
from jshard.storage.checkpoint.step_folders import CHECKPOINTS, find_steps
from jshard.storage.checkpoint.stored_arrays import (
    check,
    load_parameters,
    match_parameters,
)
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.safetensors_read import (
    check_safetensors,
    is_safetensors,
    load_safetensors,
)
from jshard.storage.hub.tied_heads import other_head
from jshard.system.cli.paths import check_path
from jshard.system.errors import UserError, warn

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
        return _of_orbax(found, optimizer)
    averages = optimizer and state.ema is not None
    if averages and jax.eval_shape(counts.updates, state.opt_state) is None:
        raise UserError(
            "checkpoint.restore_optimizer: averages (policy.ema_decay) go on by the "
            "optimizer's count of its updates, and this one keeps none: leave out one "
            "of the two keys, or give both runs' optimizer its rate as a schedule, "
            "optax.constant_schedule(...), which counts"
        )
    folder = find_step(path)
    targets, sources = match_parameters(folder, state, optimizer)
    exact = metadata.exact_by_name(state)
    check(
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
    """Goes on from a checkpoint that another program wrote with Orbax.

    Arrays are found by their paths and read into the shards of any mesh. The parameters
    are at the place in the checkpoint where the paths of all follow; so is the state of
    the optimizer, an ``optax`` tree or that of an ``nnx.Optimizer``. Batch statistics
    and random streams are read too, averages (``Policy.ema_decay``) start from the
    parameters. What is not read is a warning.

    Args:
      folder: Of the checkpoint, or of a CheckpointManager.
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
    check_path("restore_orbax: folder", folder)
    path = Path(folder).expanduser().absolute()
    if not is_orbax(path):
        what = "holds no checkpoint of Orbax's" if path.exists() else "does not exist"
        raise UserError(f"restore_orbax: {path} {what}")
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
        _of_orbax(found, restore_optimizer),
        abstract,
        lambda frozen: fsdp.init(make_model, optimizer, seed, wrt, frozen),
    )
    steps = np.int32(found.step or 0)
    return dataclasses.replace(state, step=jax.device_put(steps, state.step.sharding))


def _of_orbax(found: OrbaxMatch, optimizer: bool) -> ParameterSource:
    return ParameterSource(found.checkpoint.path, optimizer=optimizer, orbax=found)


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
