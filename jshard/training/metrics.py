"""A run's folder: what it leaves on disk while it trains."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter

from jshard.errors import RunFailed, UserError
from jshard.training.atomic import replace_file
from jshard.training.config import Config
from jshard.training.report import write_report


class RunFolder:
    """Writes a run's config, metrics, notes, TensorBoard events and report.

    Every line is on its way to the disk when `write` returns, so that a run that ends
    badly keeps the metrics written so far. Used as a context manager, which leaves a
    report however the run ends.

    Attributes:
      path: The folder.
    """

    def __init__(self, path: Path, config: Config, *, enabled: bool = True):
        """Makes the folder and writes the config.

        Args:
          path: The folder; made when it is not there.
          config: The run's config.
          enabled: False writes nothing at all: only the first process writes.

        Raises:
          UserError: The folder cannot be written, or holds another run's metrics.
        """
        self.path = path
        self._enabled = enabled
        self._notes: dict[str, Any] = {}
        if not enabled:
            return
        metrics = path / "metrics.jsonl"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if metrics.exists() and metrics.stat().st_size:
                raise UserError(
                    f"--workdir={path} already holds a run: give another, or remove it"
                )
            self._metrics = metrics.open("a", encoding="utf-8")
            replace_file(path / "config.json", _json(config.to_dict(), indent=2))
            self._tensorboard = SummaryWriter(str(path), flush_secs=10)
        except OSError as error:
            raise UserError(f"cannot write --workdir={path}: {_why(error)}") from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line of metrics; a value that is not finite becomes null."""
        if not self._enabled:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with self._failing_as_one_line():
            self._metrics.write(_json({"step": step, **finite}) + "\n")
            self._metrics.flush()
            for name, value in values.items():
                # One TensorBoard chart group for training, one for evaluation.
                group = "eval" if name.startswith("eval_") else "train"
                tag = f"{group}/{name.removeprefix('eval_')}"
                self._tensorboard.add_scalar(tag, value, step)

    def note(self, **notes: Any) -> None:
        """Adds to `notes.json`: what the report shows beside config and metrics."""
        self._notes |= notes
        if self._enabled:
            with self._failing_as_one_line():
                replace_file(self.path / "notes.json", _json(self._notes, indent=2))

    def report(self) -> None:
        """Writes `report.html` from what is there by now."""
        if self._enabled:
            with self._failing_as_one_line():
                write_report(self.path)

    def __enter__(self) -> Self:
        """Returns the folder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Writes the report and closes the files."""
        if self._enabled:
            with self._failing_as_one_line():
                self._tensorboard.close()
                self._metrics.close()
        self.report()

    @contextmanager
    def _failing_as_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(f"cannot write to {self.path}: {_why(error)}") from error


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=str)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
