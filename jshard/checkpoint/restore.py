"""Finds, verifies and reads checkpoints."""

import dataclasses
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from jshard.checkpoint import manifest, metadata
from jshard.checkpoint.older_names import renamed, stored_names
from jshard.checkpoint.safetensors_read import (
    check_safetensors,
    is_safetensors,
    load_safetensors,
)
from jshard.checkpoint.step_folders import REPLACED, find_steps, step_folder
from jshard.errors import UserError, some_of
from jshard.nn.dropout import is_random
from jshard.state import TrainState

ARRAYS = "state"  # the folder in a step's folder that Orbax writes
CHECKPOINTS = "checkpoints"  # the folder in a run's folder
PATIENCE = 30.0  # seconds, for file systems that remember what was not there


# Finding.


def is_step(path: Path) -> bool:
    """Whether ``path`` is a step's folder, whole or not."""
    return (path / manifest.FILE).exists() or (path / ARRAYS).is_dir()


def find_step(path: Path) -> Path:
    """Finds the checkpoint that a user means, and verifies it.

    Args:
      path: of a step's folder, or of a folder of checkpoints or a run's folder, whose
        newest whole checkpoint it is then.

    Returns:
      The step's folder.

    Raises:
      UserError: there is no checkpoint, or none is whole.
    """
    if is_step(path):
        if damage := find_damage(path):
            raise UserError(f"checkpoint {path} is damaged: {damage}")
        return path
    return newest_whole(checkpoints_folder(path))


def checkpoints_folder(path: Path) -> Path:
    """The folder of checkpoints in ``path``, which is a run's folder or that itself.

    Raises:
      UserError: it holds no checkpoint.
    """
    for folder in (path, path / CHECKPOINTS):
        if find_steps(folder):
            return folder
    if not path.exists():
        raise UserError(f"{path} does not exist")
    raise UserError(f"{path} holds no checkpoint")


def newest_whole(folder: Path) -> Path:
    """What `find_newest` returns.

    Raises:
      UserError: there is none, or as there.
    """
    newest = find_newest(folder)
    if newest is None:
        raise UserError(f"no checkpoint in {folder}")
    return newest


def find_newest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder that is whole; warns of those that are not.

    Process 0 looks them up; all verify them, together.

    Returns:
      The step's folder, the same on every process; None where there are no checkpoints.

    Raises:
      UserError: none is whole, a newer jshard wrote the newest, or a process does not
        see it.
    """
    damaged = []
    for path in _steps_of_first(folder)[::-1]:
        step = int(path.stem)  # the name may have a suffix, of one that is aside
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


def _steps_of_first(folder: Path) -> list[Path]:
    """The folders of the newest steps that process 0 sees, on all processes.

    A network disk may show a new one to the others later: they would restore another.
    """
    steps = np.full((64, 2), -1, np.int32)  # the step, and whether it is aside
    for i, step in enumerate(find_steps(folder)[-len(steps) :]):
        aside = step_folder(folder, step).suffix == REPLACED
        steps[i] = step, aside
    steps = np.asarray(multihost_utils.broadcast_one_to_all(steps))
    return [
        folder / (f"{step}{REPLACED}" if aside else f"{step}")
        for step, aside in steps
        if step >= 0
    ]


def find_damage(folder: Path) -> str:
    """Verifies a step; every process reads its part of the files.

    Args:
      folder: of the step.

    Returns:
      What is wrong with it, in a few words, on every process; empty when it is whole.

    Raises:
      UserError: a newer jshard wrote it.
    """
    process, count = jax.process_index(), jax.process_count()
    problems = manifest.verify(folder, process, count)
    if count > 1:
        everywhere = multihost_utils.process_allgather(np.int32(len(problems)))
        if not problems and everywhere.any():
            problems = [f"process {everywhere.argmax()} found damaged files"]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ", ".join(problems[:3]) + more


def _wait_until_seen(folder: Path) -> None:
    """Returns when all processes see a step that process 0 sees.

    Raises:
      UserError: a process does not; on all processes.
    """
    file = folder / manifest.FILE
    deadline = time.monotonic() + PATIENCE
    if not multihost_utils.broadcast_one_to_all(np.int32(file.exists())):
        return  # damaged, for all
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everywhere = multihost_utils.process_allgather(np.int32(seen))
    if not everywhere.all():
        raise UserError(
            f"process {everywhere.argmin()} does not see checkpoint {folder}, which "
            "process 0 is to start from: checkpoints need a file system that all hosts "
            "share"
        )


# Reading.


def restore_state(folder: Path, abstract: TrainState) -> TrainState:
    """Reads a whole state from a verified step.

    Args:
      folder: of the step.
      abstract: the state to make, on any mesh: names and shapes must be the
        checkpoint's, floating dtypes and memory kinds may be others.

    Raises:
      UserError: it is of another model or optimizer; the first differences are
        listed.
    """
    wanted = metadata.arrays_by_name(abstract)
    stored = metadata.read(folder)["arrays"]
    names = stored_names(abstract, stored)
    check_fits(folder, abstract)
    loaded = _load(folder, wanted, names, stored)
    return metadata.replace_arrays(abstract, loaded)


def check_fits(folder: Path, abstract: TrainState) -> None:
    """Raises UserError unless a verified step could be restored; arrays are not read.

    Args:
      folder: of the step.
      abstract: the state to make, as ``restore_state`` takes it.
    """
    stored = metadata.read(folder)["arrays"]
    described = renamed(stored, stored_names(abstract, stored))
    _check(folder, metadata.arrays_by_name(abstract), described)


def restore_parameters(
    path: Path, state: TrainState, *, optimizer: bool = False
) -> TrainState:
    """Starts a state from another run's parameters, or from safetensors files.

    Parameters go by name, whether trained or frozen, there and here. The rest of the
    model's state (batch statistics) comes with them; random streams do not.

    Args:
      path: what ``find_step`` or ``load_safetensors`` takes.
      state: a new state; what is replaced of it is deleted.
      optimizer: whether to take the optimizer's state, and the averages, as well.
        Without, averages (if any) start from the parameters.

    Returns:
      The state with those values; its step is as it was.

    Raises:
      UserError: it is of another model or optimizer; the first differences are
        listed.
    """
    source = find_parameters(path, state, optimizer=optimizer)
    return read_parameters(source, state, optimizer=optimizer)


def find_parameters(path: Path, state: TrainState, *, optimizer: bool = False) -> Path:
    """Finds what ``restore_parameters`` would read, and checks all but the values.

    Args:
      path: as for ``restore_parameters``.
      state: concrete or abstract.
      optimizer: as for ``restore_parameters``.

    Returns:
      The path of the verified step, or of safetensors, for ``read_parameters``.

    Raises:
      UserError: as ``restore_parameters``.
    """
    if is_safetensors(path):
        if optimizer:
            raise UserError(
                f"{path} holds safetensors, which have no optimizer state: leave out "
                "checkpoint.restore_optimizer"
            )
        check_safetensors(path, jax.tree.map(_abstract, state))
        return path
    folder = find_step(path)
    targets, sources = _pairs(folder, state, optimizer)
    wanted = {key: _abstract(array) for key, (_, array) in targets.items()}
    _check(folder, wanted, {key: entry for key, (_, entry) in sources.items()})
    return folder


def read_parameters(
    source: Path, state: TrainState, *, optimizer: bool = False
) -> TrainState:
    """``restore_parameters`` of what ``find_parameters`` found."""
    if is_safetensors(source):
        loaded = load_safetensors(source, jax.tree.map(_abstract, state))
        return _start_averages(metadata.replace_arrays(state, loaded))
    targets, sources = _pairs(source, state, optimizer)
    targeted = {sources[k][0]: _abstract(array) for k, (_, array) in targets.items()}
    stored = metadata.read(source)["arrays"]
    names = stored_names(state, stored)
    for _, array in targets.values():
        array.delete()
    loaded = _load(source, targeted, names, stored)
    state = metadata.replace_arrays(
        state, {name: loaded[sources[key][0]] for key, (name, _) in targets.items()}
    )
    return state if optimizer else _start_averages(state)


def _pairs(
    folder: Path, state: TrainState, optimizer: bool
) -> tuple[dict[str, tuple], dict[str, tuple]]:
    """What is read where: arrays of a state and of a step, by names both have."""
    stored = metadata.read(folder)["arrays"]
    described = renamed(stored, stored_names(state, stored))
    kinds = ("params", "frozen", "model_state", *optimizer * ("opt_state", "ema"))

    def chosen(arrays: Mapping[str, Any], random: Collection[str]) -> dict[str, tuple]:
        return {
            _anywhere(name): (name, array)
            for name, array in arrays.items()
            if name.split(".")[0] in kinds and name not in random
        }

    variables = metadata.variables_by_name(state)
    targets = chosen(
        metadata.arrays_by_name(state),
        {name for name, variable in variables.items() if is_random(variable)},
    )
    sources = chosen(
        described, {name for name, entry in described.items() if entry.get("random")}
    )
    return targets, sources


def _start_averages(state: TrainState) -> TrainState:
    """Starts averages, if the state has any, from its parameters."""
    if state.ema is None:
        return state

    def start(average: jax.Array, param: jax.Array) -> jax.Array:
        dtype, place = average.dtype, average.sharding
        average.delete()
        # Either may be in host memory; a copy, since a step takes the buffers of both.
        here = jax.device_put(param, jax.memory.Space.Device)
        return jax.device_put(jnp.array(here, dtype, copy=True), place)

    averages = jax.tree.map(start, state.ema, state.params)
    return dataclasses.replace(state, ema=averages)


def _anywhere(name: str) -> str:
    """A name that is the same for trained and frozen parameters."""
    kind, _, rest = name.partition(".")
    return f"params.{rest}" if kind == "frozen" else name


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _check(
    folder: Path, wanted: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares names, shapes and dtypes; warns of floating dtypes that are cast."""
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"it lacks {some_of(missing)}")
    if unexpected := sorted(stored.keys() - wanted.keys()):
        problems.append(f"unexpected are {some_of(unexpected)}")
    casts: dict[tuple[str, str], int] = {}
    for name in sorted(wanted.keys() & stored.keys()):
        shape, dtype = wanted[name].shape, wanted[name].dtype
        was = stored[name]
        if tuple(was["shape"]) != shape:
            problems.append(f"{name} has shape {tuple(was['shape'])}, not {shape}")
        elif was["dtype"] != str(dtype):
            if not (_is_float(was["dtype"]) and _is_float(dtype)):
                problems.append(f"{name} has dtype {was['dtype']}, not {dtype}")
            key = was["dtype"], str(dtype)
            casts[key] = casts.get(key, 0) + 1
    if problems:
        raise UserError(
            f"checkpoint {folder} is of another model or optimizer: "
            f"{some_of(problems, '; ')}"
        )
    for (was, dtype), count in casts.items():
        warnings.warn(
            f"{count} arrays of checkpoint {folder} are read as {dtype}, saved as "
            f"{was}",
            stacklevel=3,
        )


def _is_float(dtype: Any) -> bool:
    return not str(dtype).startswith("key<") and jnp.issubdtype(dtype, jnp.floating)


def _load(
    folder: Path,
    wanted: Mapping[str, Any],
    names: Mapping[str, str],
    stored: Iterable[str],
) -> dict[str, jax.Array]:
    """Reads arrays by name, of which ``names`` has those stored under another one.

    Each device reads its shards.
    """
    sources = {name: names.get(name, name) for name in wanted}
    found = {sources[name]: array for name, array in wanted.items()}
    context = ocp.Context()
    context.pytree.loading.partial_load = set(found) != set(stored)
    with context:
        tree = ocp.load((folder / ARRAYS).absolute(), metadata.nest(found))
    order = jax.tree.leaves(metadata.nest({name: name for name in found}))
    loaded = dict(zip(order, jax.tree.leaves(tree), strict=True))
    owner = {source: name for name, source in sources.items()}
    # What several take is copied: a step donates the state's buffers, each once.
    return {
        name: loaded[source]
        if owner[source] == name
        else jnp.array(loaded[source], copy=True)
        for name, source in sources.items()
    }
