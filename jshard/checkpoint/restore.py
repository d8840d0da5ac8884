"""Finds, verifies and reads checkpoints."""

import dataclasses
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jshard.checkpoint import frozen, manifest, metadata
from jshard.checkpoint.older_names import renamed, stored_names
from jshard.checkpoint.step_folders import REPLACED, find_steps, step_folder
from jshard.checkpoint.stored_arrays import ARRAYS, check, load, match_parameters
from jshard.errors import UserError, some_of
from jshard.fsdp.state import TrainState
from jshard.hub.file_tensor import FileTensor
from jshard.hub.safetensors_read import (
    check_safetensors,
    is_safetensors,
    load_safetensors,
)

CHECKPOINTS = "checkpoints"  # the folder in a run's folder
PATIENCE = 30.0  # seconds, for network file systems that cache missing files


# Finding.


def is_step(path: Path) -> bool:
    """Returns whether ``path`` is a step's folder, possibly damaged."""
    return (path / manifest.FILE).exists() or (path / ARRAYS).is_dir()


def find_step(path: Path) -> Path:
    """Finds and verifies the checkpoint that a path refers to; returns its folder.

    Args:
      path: A step's folder; or a folder of checkpoints or a run's folder, for its
        newest intact checkpoint.

    Raises:
      UserError: There is no checkpoint, or none is intact.
    """
    if is_step(path):
        if damage := find_damage(path):
            raise UserError(f"checkpoint {path} is damaged: {damage}")
        return path
    return newest_intact(checkpoints_folder(path))


def checkpoints_folder(path: Path) -> Path:
    """Returns the folder of checkpoints that ``path`` is, or that it has as a run.

    Raises:
      UserError: It contains no checkpoint.
    """
    for folder in (path, path / CHECKPOINTS):
        if find_steps(folder):
            return folder
    if not path.exists():
        raise UserError(f"{path} does not exist")
    raise UserError(f"{path} holds no checkpoint")


def newest_intact(folder: Path) -> Path:
    """Like ``find_newest``, but raises UserError if there are no checkpoints."""
    newest = find_newest(folder)
    if newest is None:
        raise UserError(f"no checkpoint in {folder}")
    return newest


def find_newest(folder: Path) -> Path | None:
    """Finds the newest intact checkpoint in a folder; warns about damaged newer ones.

    Process 0 lists the checkpoints, and all processes verify them together.

    Returns:
      The step's folder, the same on every process; None if there are no checkpoints.

    Raises:
      UserError: All are damaged, a newer jshard wrote the newest, or a process cannot
        see it.
    """
    damaged = []
    for path in _steps_on_first(folder)[::-1]:
        step = int(path.stem)  # without ".replaced"
        if jax.process_count() > 1:
            _wait_until_seen(path)
        damage = find_damage(path)
        if not damage:
            if damaged:
                warnings.warn(
                    f"{'; '.join(damaged)} (in {folder}): step {step} is used instead",
                    stacklevel=2,
                )
            return path
        damaged.append(f"step {step} is damaged: {damage}")
    if damaged:
        raise UserError(
            f"no checkpoint in {folder} can be used: {'; '.join(damaged)}; to start "
            "from step 1, remove that folder or give another --workdir"
        )
    return None


def _steps_on_first(folder: Path) -> list[Path]:
    """Returns the folders of the newest 64 steps that process 0 sees.

    A network file system may show a new one later to other processes.
    """
    steps = np.full((64, 2), -1, np.int32)  # the step, and whether it is .replaced
    for i, step in enumerate(find_steps(folder)[-len(steps) :]):
        steps[i] = step, step_folder(folder, step).suffix == REPLACED
    steps = np.asarray(multihost_utils.broadcast_one_to_all(steps))
    return [
        folder / f"{step}{REPLACED * is_replaced}"
        for step, is_replaced in steps.tolist()
        if step >= 0
    ]


def find_damage(folder: Path) -> str:
    """Verifies a step; each process reads its share of the files.

    Returns:
      What is damaged, for all processes to know; empty if the checkpoint is intact.

    Raises:
      UserError: A newer jshard wrote it.
    """
    process, count = jax.process_index(), jax.process_count()
    problems = manifest.verify(folder, process, count)
    if count > 1:
        everywhere = multihost_utils.process_allgather(np.int32(len(problems)))
        if not problems and everywhere.any():
            problems = [f"process {everywhere.argmax()} found damaged files"]
    return some_of(problems, limit=3)


def _wait_until_seen(folder: Path) -> None:
    """Waits until all processes see a step, or raises UserError on all of them."""
    file = folder / manifest.FILE
    deadline = time.monotonic() + PATIENCE
    if not multihost_utils.broadcast_one_to_all(np.int32(file.exists())):
        return  # it is damaged, for all processes
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everywhere = multihost_utils.process_allgather(np.int32(seen))
    if not everywhere.all():
        raise UserError(
            f"process {everywhere.argmin()} does not see checkpoint {folder}, which "
            "process 0 starts from: checkpoints need a file system that all hosts share"
        )


# Reading.


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


def restore_state(
    folder: Path, abstract: TrainState, *, frozen_from: ParameterSource | None = None
) -> TrainState:
    """Reads a complete state from a verified step.

    Args:
      folder: The step's folder.
      abstract: The state to create, on any mesh. Names and shapes must match the
        checkpoint's; floating-point dtypes and memory kinds may differ.
      frozen_from: Where frozen parameters are read from that the checkpoint has not; by
        default where it says they came from.

    Raises:
      UserError: The checkpoint is of another model or optimizer; the message lists the
        first differences.
    """
    names, about = check_fits(folder, abstract), metadata.read(folder)
    arrays = metadata.arrays_by_name(abstract)
    if frozen.KEY not in about:
        return metadata.replace_arrays(abstract, load(folder, arrays, names))
    if frozen_from is None:
        frozen_from = find_parameters(Path(about[frozen.KEY]["path"]), abstract)
    state = _read_frozen(frozen_from, abstract)
    arrays = {name: x for name, x in arrays.items() if not frozen.is_frozen(name)}
    state = metadata.replace_arrays(state, load(folder, arrays, names))
    frozen.check_unchanged(folder, about, state)
    return state


def _read_frozen(source: ParameterSource, abstract: TrainState) -> TrainState:
    """Reads the frozen parameters of a state."""
    if source.is_safetensors:
        loaded = load_safetensors(source.path, abstract, source.tensors)
        found = {name: x for name, x in loaded.items() if frozen.is_frozen(name)}
        return metadata.replace_arrays(abstract, found)
    targets, sources = match_parameters(source.path, abstract, optimizer=False)
    wanted = {key: leaf for key, leaf in targets.items() if frozen.is_frozen(leaf[0])}
    names = {name: sources[key][0] for key, (name, _) in wanted.items()}
    loaded = load(source.path, dict(wanted.values()), names)
    return metadata.replace_arrays(abstract, loaded)


def check_fits(folder: Path, abstract: TrainState) -> dict[str, str]:
    """Returns the stored name of each array; raises what ``restore_state`` raises."""
    about, wanted = metadata.read(folder), metadata.exact_by_name(abstract)
    stored = about["arrays"]
    names = stored_names(abstract, stored)
    if frozen.KEY in about:
        wanted = {name: x for name, x in wanted.items() if not frozen.is_frozen(name)}
    check(folder, wanted, renamed(stored, names))
    return names


def find_parameters(
    path: Path,
    state: TrainState,
    *,
    tensors: Mapping[str, FileTensor] | None = None,
    optimizer: bool = False,
) -> ParameterSource:
    """Finds and checks what ``read_parameters`` reads, without reading any values.

    Args:
      path: As for ``find_step`` or ``load_safetensors``.
      state: Concrete or abstract.
      tensors: As for ``ParameterSource``.
      optimizer: As for ``ParameterSource``.

    Raises:
      UserError: The source is of another model or optimizer; the message lists the
        first differences.
    """
    source = ParameterSource(path, tensors, optimizer)
    if source.is_safetensors:
        if optimizer:
            raise UserError(
                f"{path} holds safetensors, which have no optimizer state: leave out "
                "checkpoint.restore_optimizer"
            )
        check_safetensors(path, state, tensors)
        return source
    folder = find_step(path)
    targets, sources = match_parameters(folder, state, optimizer)
    exact = metadata.exact_by_name(state)
    check(
        folder,
        {key: exact[name] for key, (name, _) in targets.items()},
        {key: entry for key, (_, entry) in sources.items()},
    )
    return dataclasses.replace(source, path=folder)


def read_parameters(source: ParameterSource, state: TrainState) -> TrainState:
    """Starts a state from another run's parameters, or from safetensors files.

    Parameters are matched by name, whether they are trained or frozen in either run.
    Adapters (``nnx.LoRAParam``) that the source has not keep their initial values.
    Other model state (batch statistics) is read too, random streams are not.

    Args:
      source: From ``find_parameters``.
      state: A new state; the arrays that are replaced are deleted.

    Returns:
      The state with those values and an unchanged step.
    """
    if source.is_safetensors:
        loaded = load_safetensors(source.path, state, source.tensors)
        return _start_averages(metadata.replace_arrays(state, loaded))
    targets, sources = match_parameters(source.path, state, source.optimizer)
    wanted, names = {}, {}
    for key, (name, array) in targets.items():
        wanted[name] = jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=array.sharding
        )
        names[name] = sources[key][0]
        array.delete()
    state = metadata.replace_arrays(state, load(source.path, wanted, names))
    return state if source.optimizer else _start_averages(state)


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
