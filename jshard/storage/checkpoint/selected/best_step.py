"""Which of a run's checkpoints are kept: the best by a metric, and some by time."""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.step_folders import find_steps, step_folder
from jshard.system.errors import UserError


class Best(NamedTuple):
    """The checkpoint with the best value of a metric."""

    step: int
    metric: str
    value: float

    @property
    def result(self) -> str:
        """The metric and its value."""
        return f"{self.metric} {self.value:.4g}"

    def __str__(self) -> str:
        return f"best: step {self.step}, {self.result}"


def best_among(
    folders: Mapping[int, Path], metric: str, *, highest: bool
) -> Best | None:
    """Returns the first step with the best metric; None if none has a finite one."""
    found = {
        step: value
        for step, about in _readable(folders)
        if math.isfinite(value := about["metrics"].get(metric, math.nan))
    }
    if not found:
        return None
    choose = max if highest else min
    step = choose(sorted(found), key=lambda step: found[step])
    return Best(step, metric, found[step])


def hours_apart(folders: Mapping[int, Path], hours: float) -> set[int]:
    """Returns the first step, and each that was saved this long after the last of them.

    Steps whose description does not say when they were saved are not among them.
    """
    chosen, last = set(), None
    for step, about in sorted(_readable(folders), key=lambda found: found[0]):
        with suppress(ValueError):
            saved = datetime.fromisoformat(about["created"]).timestamp()
            if last is None or saved - last >= hours * 3600:
                chosen.add(step)
                last = saved
    return chosen


def best_of(folder: Path) -> Best | None:
    """Returns the best in a folder of checkpoints, by the newest one's config.

    None if its `checkpoint.best` is empty, or no checkpoint has a finite value of it.
    """
    folders = _folders(folder)
    metric, highest = _criterion(folders)
    return best_among(folders, metric, highest=highest) if metric else None


def require_best(folder: Path, shown: str) -> Best:
    """Returns what `best_of` does; a UserError without one. `shown` names the run."""
    best, steps = best_of(folder), find_steps(folder)
    if best is not None:
        return best
    metric, _ = _criterion(_folders(folder))
    if metric:
        why = f"no checkpoint has a finite {metric}"
    else:
        why = "checkpoint.best names no metric in its config"
    raise UserError(
        f"{shown} has no best checkpoint, as {why}; give one of its steps: "
        f"{', '.join(map(str, steps))}"
    )


def _folders(folder: Path) -> dict[int, Path]:
    return {step: step_folder(folder, step) for step in find_steps(folder)}


def _criterion(folders: Mapping[int, Path]) -> tuple[str, bool]:
    """Returns `checkpoint.best`, and whether its highest value is the best."""
    for _, about in _readable(dict(sorted(folders.items(), reverse=True))):
        given = about["config"].get("checkpoint")
        if isinstance(given, dict):
            return str(given.get("best") or ""), given.get("best_is") == "highest"
        break
    return "", False


def _readable(folders: Mapping[int, Path]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yields steps with their metadata, those left out that are damaged."""
    for step, folder in folders.items():
        with suppress(OSError, ValueError):
            yield step, metadata.read(folder)
