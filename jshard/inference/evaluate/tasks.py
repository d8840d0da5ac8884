"""Tasks by their names in lm_eval, and what goes wrong with them in one line."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean, one_line

ROWS = 32  # requests that are computed together


def load_tasks(
    option: str, names: Iterable[str], folder: Path | None = None, *, shows: bool = True
) -> Any:
    """Reads tasks and their datasets.

    Names are those of tasks, groups or tags, patterns of them, or paths of YAML files;
    the folder has more. ``option`` is what gave them, for errors.

    Returns:
      Tasks and groups, as ``lm_eval.simple_evaluate(tasks=...)`` takes them.

    Raises:
      UserError: lm_eval is missing or has no such task, or its dataset is not to be
        had.
    """
    if not shows:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, as it is now
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{option}: needs EleutherAI's lm_eval: pip install 'jshard[evaluate]'"
        ) from error
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request
    manager = TaskManager(include_path=folder)
    found = []
    for name in names:
        matches = manager.match_tasks([name]) or [name] * Path(name).is_file()
        if not matches:
            raise UserError(
                f"{option}={name}: lm_eval has no such task"
                f"{did_you_mean(name, manager.all_tasks)}"
            )
        for match in matches:
            found += _load(manager, match, f"{option}={match}")
    try:
        manager.load(found)
    except ValueError as error:  # a task that is in two groups
        raise UserError(f"{option}: {one_line(str(error))}") from error
    return found


def _load(manager: Any, name: str, where: str) -> list[Any]:
    """Returns a group, or a task, or those with a tag."""
    try:
        loaded = manager.load([name])
    except ImportError as error:
        raise UserError(
            f"{where}: the task needs another package: pip install {error.name}"
        ) from error
    except ConnectionError as error:  # datasets raises no other
        raise UserError(
            f"{where}: its dataset is neither in the cache of Hugging Face's datasets "
            f"(HF_HOME) nor can it be fetched: {one_line(str(error))}"
        ) from error
    except Exception as error:  # of the task's YAML and Python, which are others'
        why = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{where}: the task cannot be loaded: {why}") from error
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"{where}: runs what a model writes, which jshard does not")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"{where}: has pictures or sound, and a decoder reads text")
    groups = list(loaded["groups"].values())
    return groups[:1] or list(loaded["tasks"].values())  # the first has the others
