"""TensorBoard event files, written without a delay."""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.compat.tensorboard_records import (
    hyperparameter_records,
    picture_record,
    restart_record,
    scalar_record,
    text_record,
    version_record,
)
from jshard.training.run_folder.append import AppendedFile


class EventFile(AppendedFile):
    """A new file of a run's scalars, hyperparameters and samples in its folder.

    With `resume_from`, TensorBoard drops what older files hold of later steps.
    """

    def __init__(
        self,
        folder: Path,
        resume_from: int | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        super().__init__(folder / name)
        self.write(version_record())
        if resume_from is not None:
            self.write(restart_record(resume_from + 1))
        if hyperparameters:
            metrics = ("train/loss", "eval/loss")
            self.write(hyperparameter_records(hyperparameters, metrics))

    def add(self, step: int, values: Mapping[str, float]) -> str:
        """Writes the values of a step; returns what `write` returns."""
        problem = ""
        for name, value in values.items():
            # TensorBoard groups charts by what precedes the slash.
            group, _, rest = name.partition("_")
            grouped = group in ("eval", "checkpoint") and rest
            tag = f"{group}/{rest}" if grouped else f"train/{name}"
            problem = self.write(scalar_record(step, tag, value))
        return problem

    def add_text(self, step: int, name: str, text: str) -> str:
        """Writes a text of a step; returns what `write` returns."""
        return self.write(text_record(step, f"samples/{name}", text))

    def add_picture(
        self, step: int, name: str, png: bytes, shape: tuple[int, ...]
    ) -> str:
        """Writes a picture of a step; returns what `write` returns."""
        height, width = shape[:2]
        return self.write(picture_record(step, f"samples/{name}", png, height, width))
