"""How many examples a run has read, in a checkpoint: steps may differ in batch size."""

import json
from pathlib import Path

from jshard.storage.checkpoint import metadata
from jshard.system.errors import UserError
from jshard.system.files.untrusted import read_json

FILE = "data_position.json"  # in a step's folder


def position_files(examples: int) -> dict[str, str]:
    """Returns the files that a checkpoint stores for a position, by name."""
    return {FILE: json.dumps({"examples": examples})}


def read_position(folder: Path, step: int, batch_size: int) -> int:
    """Returns how many examples were read up to a step, from its folder.

    Checkpoints of earlier versions do not say it: all their steps had the batch size of
    their config.

    Args:
      folder: Of the checkpoint or the local copy.
      step: The step.
      batch_size: Of the config to go on with.

    Raises:
      UserError: It is damaged.
    """
    file = folder / FILE
    try:
        if file.exists():
            examples = read_json(file)["examples"]
            if type(examples) is not int or examples < 0:
                raise ValueError(f"examples is {examples!r}")
            return examples
        if (folder / metadata.FILE).exists():
            batch_size = metadata.read(folder)["config"].get("batch_size", batch_size)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file}: cannot be read as a position in training data: {error!r}"
        ) from error
    return step * batch_size
