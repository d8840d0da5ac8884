"""Folders that programs wrote with Orbax alone: told from jshard's, and opened.

A *checkpoint* is a folder of one *item*, or of several in folders of their names. An
item lists its arrays in ``_METADATA``, by their paths in the tree that was saved. A
CheckpointManager keeps checkpoints in folders named by their steps: ``8``, ``ckpt_8``.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jax.experimental import multihost_utils

from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.buckets.arrays import shown
from jshard.storage.checkpoint.buckets.orbax_mirror import (
    CHECKPOINT,
    COMMITTED,
    DATABASE,
    ITEM,
    in_bucket,
)
from jshard.storage.checkpoint.stored_arrays import ARRAYS, INDEX
from jshard.system.errors import UserError, some_of
from jshard.system.files.untrusted import path_inside, read_json

Keys: TypeAlias = tuple[str, ...]  # the path of an array in the tree that was saved

_UNFINISHED = ".orbax-checkpoint-tmp"
_STEP = re.compile(r"(?:.*_)?([0-9]{1,9})")


@dataclasses.dataclass(frozen=True)
class OrbaxCheckpoint:
    """A checkpoint of Orbax's.

    Attributes:
      path: Its folder.
      step: What its CheckpointManager calls it; None if it is in no such folder.
      arrays: TensorStore's spec of each array. The first key is the name of the item,
        where there are several.
    """

    path: Path
    step: int | None
    arrays: Mapping[Keys, dict[str, Any]]

    def __str__(self) -> str:
        of_step = "" if self.step is None else f", step {self.step}"
        return f"Orbax's checkpoint {shown(self.path)}{of_step}"


def is_orbax(path: Path) -> bool:
    """Returns whether a folder is a checkpoint of Orbax's, or holds some."""
    return _is_checkpoint(path) or bool(_steps(path) or _items(path))


def check_not_orbax(folder: Path) -> None:
    """Raises UserError for a folder of Orbax's, where one of jshard's is needed."""
    if _step_of_jshard(folder) is not None:
        return
    if _is_checkpoint(folder):
        what = "is a checkpoint of Orbax's"
    elif steps := _steps(folder):
        what = f"holds checkpoints of Orbax's (steps {some_of([*map(str, steps)])})"
    else:
        return
    name = shown(folder)
    raise UserError(
        f"{name} {what}, not of jshard's, which keeps its own in another folder; "
        f"jshard.restore_orbax, or --config.checkpoint.restore={name} in a new run, "
        "starts from it"
    )


def open_orbax(path: Path, step: int | None = None) -> OrbaxCheckpoint:
    """Opens a checkpoint, or the one of a step in a CheckpointManager's folder.

    Args:
      path: A folder that ``is_orbax``.
      step: The step; None takes the newest, as process 0 sees it.

    Raises:
      UserError: There is no such step, or the checkpoint is not complete.
    """
    if (steps := _steps(path)) and not _is_checkpoint(path):
        if step is None:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(max(steps))))
        if step not in steps:
            raise UserError(f"{shown(path)} has no step {step}; there are: {[*steps]}")
        if len(steps[step]) > 1:
            names = " and ".join(folder.name for folder in steps[step])
            raise UserError(
                f"{shown(path)} has {names}, both of step {step}: give one folder"
            )
        (path,) = steps[step]
    elif step is not None:
        raise UserError(f"{shown(path)} is one checkpoint: leave out step={step}")
    elif re.fullmatch("[0-9]{1,9}", path.name):
        step = int(path.name)
    _check_complete(path)
    items = [path] if (path / ITEM).exists() else _items(path)
    arrays: dict[Keys, dict[str, Any]] = {}
    for item in items:
        above = (item.name,) if len(items) > 1 else ()
        arrays |= {(*above, *keys): spec for keys, spec in _arrays(item).items()}
    if not arrays:
        raise UserError(f"{shown(path)}: Orbax's {ITEM} lists no array there")
    return OrbaxCheckpoint(path, step, arrays)


def _is_checkpoint(path: Path) -> bool:
    if any((path / name).is_file() for name in (ITEM, *CHECKPOINT)):
        return True
    # Older ones have no file of their own. What is named by a number is a step.
    return any(
        not _STEP.fullmatch(item.name) and not (item / CHECKPOINT[0]).exists()
        for item in _items(path)
    )


def _items(path: Path) -> list[Path]:
    return [x for x in _folders(path) if (x / ITEM).is_file()]


def _steps(path: Path) -> dict[int, list[Path]]:
    """Returns the checkpoints that are named by a step, by it, in ascending order."""
    found: dict[int, list[Path]] = {}
    for folder in _folders(path):
        named = _STEP.fullmatch(folder.name)
        if named and not _unfinished(folder) and _is_checkpoint(folder):
            found.setdefault(int(named[1]), []).append(folder)
    return dict(sorted(found.items()))


def _folders(path: Path) -> list[Path]:
    return sorted(x for x in path.iterdir() if x.is_dir()) if path.is_dir() else []


def _step_of_jshard(path: Path) -> Path | None:
    """Returns the step's folder of jshard's that a folder is the arrays of."""
    for inner in (path, path.parent):
        files = (inner.parent / name for name in (manifest.FILE, metadata.FILE))
        if inner.name == ARRAYS and any(file.exists() for file in files):
            return inner.parent
    return None


def _check_complete(path: Path) -> None:
    if (step := _step_of_jshard(path)) is not None:
        raise UserError(
            f"{shown(path)} has the arrays of a checkpoint of jshard's: give "
            f"{shown(step)}"
        )
    if _unfinished(path):
        raise UserError(
            f"{shown(path)} is a save that Orbax did not complete: give another"
        )


def _unfinished(path: Path) -> bool:
    """Returns whether Orbax did not complete a save, by its name or what it wrote."""
    if _UNFINISHED in path.name:
        return True
    about = path / CHECKPOINT[0]
    if in_bucket(path) is None or (path / COMMITTED).exists() or not about.exists():
        return False  # on a disk, its name is another until it is complete
    try:
        return read_json(about).get("commit_timestamp_nsecs", 0) is None
    except (OSError, ValueError, AttributeError):
        return False  # what is damaged is told where the arrays are read


def _arrays(item: Path) -> dict[Keys, dict[str, Any]]:
    """Returns TensorStore's specs of an item's arrays."""
    name = shown(item)
    try:
        content = read_json(item / ITEM)
        form: dict[str, Any] = {
            "driver": "zarr3" if content.get("use_zarr3") else "zarr"
        }
        if content.get("store_array_data_equal_to_fill_value"):
            form["fill_missing_data_reads"] = False  # a missing file is an error
        entries = content["tree_metadata"].values()
        paths = [_keys(x) for x in entries if _is_array(x["value_metadata"])]
        if (item / DATABASE).exists():
            base = _store(item, "")
            database = {"driver": "ocdbt", "base": base, "cache_pool": INDEX}
            stores = [database | {"path": f"{'.'.join(keys)}/"} for keys in paths]
        elif any(item.glob(f"*/{DATABASE}")):
            raise UserError(
                f"{name} has no {DATABASE}: Orbax did not complete it, give another"
            )
        else:
            places = [path_inside(item, ".".join(keys)) for keys in paths]
            stores = [_store(item, f"{x.relative_to(item)}/") for x in places]
    except OSError as error:
        raise UserError(f"cannot read {name}/{ITEM}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{name}/{ITEM} lists no arrays as Orbax does") from error
    return {
        keys: {**form, "kvstore": store}
        for keys, store in zip(paths, stores, strict=True)
    }


def _store(item: Path, below: str) -> dict[str, Any]:
    """Returns TensorStore's key-value store of what is below an item's folder."""
    if (where := in_bucket(item)) is not None:
        return where.spec(below)
    return {"driver": "file", "path": f"{item}/{below}"}


def _is_array(about: Mapping[str, Any]) -> bool:
    """Returns whether something is stored, rather than None, {} or a text."""
    return not about.get("skip_deserialize") and about["value_type"] != "string"


def _keys(entry: Mapping[str, Any]) -> Keys:
    return tuple(str(key["key"]) for key in entry["key_metadata"])
