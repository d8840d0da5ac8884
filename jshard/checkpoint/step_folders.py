"""The folders of steps: built, replaced and deleted so that no moment loses one.

A checkpoint is built as ``100.saving`` and renamed to ``100`` once it is whole. One
that it replaces steps aside first, as ``100.replaced``, and is the step's checkpoint
until the new one has the name. What is to go is renamed to ``100.deleting`` before its
files are removed. So whatever a process dies in, ``100``, or else ``100.replaced``, was
once whole.
"""

import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path

from jshard.checkpoint.atomic import sync_folder

SAVING, REPLACED, DELETING = ".saving", ".replaced", ".deleting"
SOUND = ".sound"  # a file in the folder of a save, until that fails on any process

_LATE = 1.0  # seconds without a trace of late writes, after which there are no more
_LATEST = 20.0  # seconds after which whoever still writes there is left alone


def find_steps(folder: Path) -> list[int]:
    """The steps in a folder of checkpoints, ascending; not verified."""
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    return sorted(int(name) for name in names if name.isdigit())


def step_folder(folder: Path, step: int) -> Path:
    """Where a step's checkpoint is: aside, where its replacement never came."""
    final, replaced = folder / str(step), folder / f"{step}{REPLACED}"
    return replaced if replaced.is_dir() and not final.exists() else final


def put_in_place(built: Path) -> Path:
    """Makes a whole ``100.saving`` the checkpoint ``100``; returns that folder.

    Raises:
      OSError: it is not; what there was of the step still is.
    """
    final, replaced = built.with_suffix(""), built.with_suffix(REPLACED)
    if final.exists():  # of a run that went back to an earlier step
        final.rename(replaced)
    built.rename(final)
    (final / SOUND).unlink(missing_ok=True)
    sync_folder(final.parent)
    if replaced.exists():
        delete(replaced)
    return final


def delete(folder: Path) -> None:
    """Deletes a step's folder; where that fails it warns, which ends no save."""
    leaving = folder.with_suffix(DELETING)
    try:
        folder.rename(leaving)  # at once: never a half under a whole one's name
        shutil.rmtree(leaving)
    except OSError as error:
        logging.getLogger("jshard").warning("cannot delete: %s", error)


def give_up(built: Path) -> None:
    """Removes the folder of a save that failed, and what is still written to it.

    Orbax tells of the first write that fails; others may be under way, and make the
    folder anew.
    """
    now = time.monotonic()
    quiet, latest = now + _LATE, now + _LATEST
    while now < min(quiet, latest):
        if built.exists():
            shutil.rmtree(built, ignore_errors=True)
            quiet = now + _LATE
        time.sleep(_LATE / 20)
        now = time.monotonic()
    tidy(built.parent)


def tidy(folder: Path) -> None:
    """Ends what saves and deletions began that failed, or in which all died."""

    def left(suffix: str) -> list[Path]:
        paths = folder.glob(f"*{suffix}")
        return [path for path in paths if path.name.removesuffix(suffix).isdigit()]

    for path in left(REPLACED):
        if path.with_suffix("").exists():
            delete(path)
        else:
            with suppress(OSError):  # who cannot write here can read it all the same
                path.rename(path.with_suffix(""))
    for path in left(SAVING) + left(DELETING):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"*/{SOUND}"):
        if path.parent.name.isdigit():
            path.unlink(missing_ok=True)
