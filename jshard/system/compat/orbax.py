"""Reads Orbax's files without Orbax, and suppresses what it prints when a save fails.

Tested with Orbax 0.12.8 and tensorstore 0.1.86. If reading breaks, checkpoints cannot
be restored or exported. If the filters break, users see thousands of lines beside the
error that ``Save.error`` holds already. Saving uses Orbax itself.
"""

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstore


def open_array(folder: Path, name: str, context: Any = None) -> Any:
    """Opens an array of a checkpoint so that it can be read chunk by chunk.

    ``jshard.export`` holds one chunk in memory at a time; Orbax reads full shards.
    Orbax stores arrays in a subfolder, as an OCDBT database of Zarr 3 arrays.
    The folder is what was passed to Orbax; nested names have dots between them.

    Raises:
      FileNotFoundError: the folder has no OCDBT database.
      ValueError: the database has no such array.
    """
    return open_in_database(database(folder), name, context)


def database(folder: Path) -> dict[str, Any]:
    """Returns TensorStore's spec of the database of a checkpoint's arrays.

    Raises:
      FileNotFoundError: the folder has none.
    """
    found = next(folder.glob("*/manifest.ocdbt"), None)
    if found is None:
        raise FileNotFoundError(f"no OCDBT database in {folder}")
    base = {"driver": "file", "path": f"{found.parent}/"}
    return {"driver": "ocdbt", "base": base}


def open_in_database(database: dict[str, Any], name: str, context: Any = None) -> Any:
    """Like ``open_array``, of an OCDBT database anywhere: its TensorStore spec."""
    spec = {"driver": "zarr3", "kvstore": database | {"path": f"{name}/"}}
    return tensorstore.open(spec, read=True, context=context).result()


def silence() -> None:
    """Installs the filters; repeated calls have no further effect."""
    logging.getLogger("absl").addFilter(_not_orbax)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _pass_on:
        sys.unraisablehook = functools.partial(_pass_on, before)


def _not_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "/orbax/" not in record.pathname


def _pass_on(before: Callable[[Any], Any], unraisable: Any) -> None:
    """Hands an error to a hook, unless it is a write that ends after a failed save.

    Orbax has closed the event loop to which TensorStore would report it.
    """
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        before(unraisable)
