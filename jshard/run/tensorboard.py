"""TensorBoard event files."""

import functools
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jshard.compat.tensorboard_records import (
    hyperparameter_records,
    picture_record,
    restart_record,
    scalars_record,
    text_record,
    version_record,
)
from jshard.run.append import AppendedFile
from jshard.run.background import Background

_REST = 0.5  # seconds between writes


class EventFile:
    """A new file of a run's scalars, hyperparameters and samples in its folder.

    A thread encodes and writes them. With `resume_from`, TensorBoard drops what older
    files hold of later steps.

    Attributes:
      problem: Why some of it is not written yet; empty if all of it is.
    """

    def __init__(
        self,
        folder: Path,
        resume_from: int | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = AppendedFile(folder / name)
        self._background = Background(self._write, _REST, "jshard-tensorboard")
        self._put = self._background.put
        self.problem = ""
        self._put(version_record)
        if resume_from is not None:
            self._put(functools.partial(restart_record, resume_from + 1))
        if hyperparameters:
            metrics = ("train/loss", "eval/loss")
            self._put(
                functools.partial(hyperparameter_records, hyperparameters, metrics)
            )

    def _write(self, records: list[Callable[[], bytes]]) -> None:
        self.problem = self._file.write(b"".join(record() for record in records))

    def add(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the values of a step, and the time in seconds since 1970."""
        self._put(lambda: scalars_record(step, when, _by_tag(values)))

    def add_text(self, step: int, name: str, text: str) -> None:
        """Adds a text of a step."""
        self._put(lambda: text_record(step, f"samples/{name}", text))

    def add_picture(
        self, step: int, name: str, png: bytes, shape: tuple[int, ...]
    ) -> None:
        """Adds a picture of a step."""
        height, width = shape[:2]
        self._put(lambda: picture_record(step, f"samples/{name}", png, height, width))

    def sync(self) -> str:
        """Waits until all of it is on the disk; returns why some of it is not."""
        self._background.drain()
        return self._file.sync()

    def close(self) -> str:
        """Closes the file; what is still waiting for the disk is lost."""
        self._background.close()
        problem = self._file.close()
        if self._background.error is not None:
            raise self._background.error  # a bug
        return problem


def _by_tag(values: Mapping[str, float]) -> dict[str, float]:
    """Returns values by TensorBoard's tags, whose charts are grouped by the slash."""

    def tag(name: str) -> str:
        group, _, rest = name.partition("_")
        grouped = group in ("eval", "checkpoint") and rest
        return f"{group}/{rest}" if grouped else f"train/{name}"

    return {tag(name): value for name, value in values.items()}
