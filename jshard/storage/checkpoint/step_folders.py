"""The folders of steps: built, replaced and deleted without losing a checkpoint.

A checkpoint is built as ``100.saving`` and renamed to ``100`` when it is complete. A
checkpoint that it replaces is first renamed to ``100.replaced``, and remains the
checkpoint of that step until the new one has its name. A folder to delete is renamed to
``100.deleting`` before its files are removed. Whenever a process dies, ``100``, or
otherwise ``100.replaced``, was complete at some time.
"""

import logging
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from jshard.system.files.atomic import sync_folder

CHECKPOINTS = "checkpoints"  # the folder in a run's folder
SAVING, REPLACED, DELETING = ".saving", ".replaced", ".deleting"

_LAST = 2**31 - 1  # steps are int32
_QUIET = 1.0  # seconds without late writes, after which none are expected
_LATEST = 20.0  # seconds after which late writes are no longer waited for


def find_steps(folder: Path) -> list[int]:
    """Returns the steps in a folder of checkpoints, ascending and not verified."""
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    return sorted(int(name) for name in names if _is_step(name))


def _is_step(name: str) -> bool:
    """Returns whether a folder is named as jshard names those of steps."""
    found = re.fullmatch("0|[1-9][0-9]{0,9}", name)
    return found is not None and int(name) <= _LAST


def step_folder(folder: Path, step: int) -> Path:
    """Returns a step's folder: ``.replaced`` if its replacement was never completed."""
    final, replaced = folder / str(step), folder / f"{step}{REPLACED}"
    return replaced if replaced.is_dir() and not final.exists() else final


def put_in_place(built: Path) -> None:
    """Makes a complete ``100.saving`` the checkpoint ``100``.

    Raises:
      OSError: It failed; an earlier checkpoint of the step is still there.
    """
    final, replaced = built.with_suffix(""), built.with_suffix(REPLACED)
    if final.exists():  # the run returned to an earlier step
        final.rename(replaced)
    built.rename(final)
    sync_folder(final.parent)
    if replaced.exists():
        delete(replaced)


def delete(folder: Path) -> None:
    """Deletes a step's folder; only warns on failure, so that no save fails for it."""
    leaving = folder.with_suffix(DELETING)
    try:
        folder.rename(leaving)  # so that a partly deleted folder has another name
        shutil.rmtree(leaving)
    except OSError as error:
        logging.getLogger("jshard").warning("cannot delete: %s", error)


def give_up(built: Path) -> None:
    """Removes the folder of a failed save, including late writes to it.

    Orbax reports the first write that fails; others may still be in progress and create
    the folder again.
    """
    now = time.monotonic()
    quiet, latest = now + _QUIET, now + _LATEST
    while now < min(quiet, latest):
        if built.exists():
            shutil.rmtree(built, ignore_errors=True)
            quiet = now + _QUIET
        time.sleep(_QUIET / 20)
        now = time.monotonic()
    tidy(built.parent)


def tidy(folder: Path) -> None:
    """Completes or removes what interrupted saves and deletions left behind."""

    def leftovers(suffix: str) -> list[Path]:
        paths = folder.glob(f"*{suffix}")
        return [path for path in paths if path.name.removesuffix(suffix).isdigit()]

    for path in leftovers(REPLACED):
        if path.with_suffix("").exists():
            delete(path)
        else:
            with suppress(OSError):  # it can be restored under this name, too
                path.rename(path.with_suffix(""))
    for path in leftovers(SAVING) + leftovers(DELETING):
        shutil.rmtree(path, ignore_errors=True)
