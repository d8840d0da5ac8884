"""The files that Orbax writes a checkpoint's arrays to, read without Orbax."""

from pathlib import Path
from typing import Any

import tensorstore


def open_array(folder: Path, name: str, context: Any = None) -> Any:
    """Opens an array where it lies, to be read chunk by chunk.

    For ``jshard.export``, which holds one chunk at a time; Orbax reads whole shards.
    Orbax has a folder in the step's, which is an OCDBT database of Zarr 3 arrays.

    Tried on Orbax 0.12.8 with tensorstore 0.1.86. When it breaks, nothing can be
    exported; saves and restores, which are Orbax's own, go on as before.

    Args:
      folder: that Orbax was given.
      name: of the array, nested names with dots between them.
      context: a ``tensorstore.Context``.

    Returns:
      A ``tensorstore.TensorStore``.

    Raises:
      FileNotFoundError: there is no database.
      ValueError: there is no such array in it.
    """
    database = next(folder.glob("*/manifest.ocdbt"), None)
    if database is None:
        raise FileNotFoundError(f"no OCDBT database in {folder}")
    kvstore = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{database.parent}/"},
        "path": f"{name}/",
    }
    spec = {"driver": "zarr3", "kvstore": kvstore}
    return tensorstore.open(spec, read=True, context=context).result()
