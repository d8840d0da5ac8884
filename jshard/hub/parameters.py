"""The parameters of a pretrained model: from a checkpoint, or from safetensors."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard.checkpoint import frozen, metadata
from jshard.checkpoint.restore import find_step
from jshard.checkpoint.stored_arrays import check, load_parameters, match_parameters
from jshard.errors import UserError
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.state import TrainState
from jshard.hub.file_tensor import FileTensor
from jshard.hub.safetensors_read import (
    check_safetensors,
    is_safetensors,
    load_safetensors,
)
from jshard.hub.tied_heads import other_head
from jshard.optim import counts

# How the names of what is read begin, but for frozen parameters.
_BESIDE_FROZEN = ("params.", "model_state.", "opt_state.", "ema.")


@dataclasses.dataclass(frozen=True)
class ParameterSource:
    """What parameters are read from, as ``find_parameters`` found it.

    Attributes:
      path: A verified step's folder, or safetensors.
      tensors: As for ``load_safetensors``.
      optimizer: Whether the optimizer state and the averages are read as well. If not,
        averages start from the parameters.
    """

    path: Path
    tensors: Mapping[str, FileTensor] | None = None
    optimizer: bool = False

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
    return state if source.optimizer else _start_averages(state)


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
