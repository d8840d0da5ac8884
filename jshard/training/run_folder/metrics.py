"""A run's folder: what it leaves on disk while it trains."""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from jshard.checkpoint import step_folders
from jshard.checkpoint.atomic import replace_file
from jshard.checkpoint.restore import CHECKPOINTS
from jshard.errors import RunFailed, UserError
from jshard.training.config.config import Config
from jshard.training.report.report import METRICS, REPORT, read_metrics, write_report
from jshard.training.run_folder.append import AppendedFile
from jshard.training.run_folder.lock import lock_folder
from jshard.training.run_folder.tensorboard import EventFile


class RunFolder:
    """Writes a run's config, metrics, notes, TensorBoard events and report.

    Every line is on its way to the disk when `write` returns, so that a run that ends
    badly keeps the metrics written so far. A disk that is full does not stop a run:
    the user is told, and what it did not take is written as soon as it can be. Used as
    a context manager, which leaves a report however the run ends. While it is open, no
    other process can open it.

    Attributes:
      path: The folder.
      config: The run's config as it is written, with the recipe's name as `recipe`.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        *,
        recipe: str = "",
        resume_from: int | None = None,
        lines: Sequence[Mapping[str, Any]] | None = None,
        enabled: bool = True,
    ):
        """Opens the folder, once everything in it was checked, and writes the config.

        Args:
          path: The folder; made when it is not there.
          config: The run's config.
          recipe: Its recipe's name.
          resume_from: The step after which the folder's run goes on: what it wrote of
            later steps goes. 0 starts it again; None is a new run.
          lines: The metrics to go on from; by default those of the folder.
          enabled: False writes nothing at all: only the first process writes.

        Raises:
          UserError: The folder cannot be written, is another process's, holds another
            run's metrics, or holds metrics that cannot be read.
        """
        self.path = path
        self.config = {"recipe": recipe} | config.to_dict()
        self._enabled = enabled
        self._notes: dict[str, Any] = {}
        self._waits = False  # whether the disk did not take all
        if not enabled:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                self._lock = undo.enter_context(lock_folder(path))
                self._open(resume_from, lines)
                undo.pop_all()
        except OSError as error:
            raise UserError(f"cannot write --workdir={path}: {_why(error)}") from error

    def _open(
        self, resume_from: int | None, lines: Sequence[Mapping[str, Any]] | None
    ) -> None:
        metrics, page = self.path / METRICS, self.path / REPORT
        if page.is_dir():  # it would be found out at the end
            raise UserError(f"{page} is a folder, in place of the report: remove it")
        if resume_from is None:
            if metrics.exists() and metrics.stat().st_size:
                raise UserError(
                    f"--workdir={self.path} already holds a run, and no checkpoint "
                    "to resume it from: give another, or remove it"
                )
        else:
            lines = read_metrics(self.path) if lines is None else lines
            kept = [_json(line) + "\n" for line in lines if line["step"] <= resume_from]
            self._notes = _read_object(self.path / "notes.json")
            replace_file(metrics, "".join(kept))
            self._notes["resumed"] = [*self._notes.get("resumed", []), resume_from]
            self._write_notes()
        replace_file(self.path / "config.json", _json(self.config, indent=2))
        self._metrics = AppendedFile(metrics)
        self._events = EventFile(self.path, resume_from)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line of metrics; a value that is not finite becomes null."""
        if not self._enabled:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = _json({"step": step, **finite}) + "\n"
        self._tell(self._metrics.write(line.encode()), self._events.add(step, values))

    def metrics(self) -> str:
        """Returns all lines so far, as text."""
        return self._metrics.read().decode() if self._enabled else ""

    def flush(self) -> None:
        """Waits until all metrics are on the disk.

        Called before a checkpoint counts: the steps up to it are not run again, so a
        power cut must not take their lines.
        """
        if self._enabled:
            self._tell(self._metrics.sync(), self._events.sync())

    def _tell(self, *problems: str) -> None:
        """Warns of a disk that takes no more, once until it does again."""
        problem = max(problems)
        if problem and not self._waits:
            warnings.warn(
                f"cannot write to {self.path}: {problem}; training goes on, and its "
                "metrics wait in memory",
                stacklevel=3,
            )
        self._waits = bool(problem)

    def note(self, **notes: Any) -> None:
        """Adds to `notes.json`: what the report shows beside config and metrics."""
        self._notes |= notes
        if self._enabled:
            with self._failing_as_one_line():
                self._write_notes()

    def _write_notes(self) -> None:
        replace_file(self.path / "notes.json", _json(self._notes, indent=2))

    def report(self) -> None:
        """Writes `report.html` from what is there by now."""
        if self._enabled:
            try:
                write_report(self.path)
            except OSError as error:
                self._tell(_why(error))

    def __enter__(self) -> Self:
        """Returns the folder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the files, writes the report and gives the folder back.

        Raises:
          RunFailed: The disk does not take what waits.
        """
        if not self._enabled:
            return
        with self._lock, self._failing_as_one_line():
            problems = [self._metrics.close(), self._events.close()]
            write_report(self.path)
            if any(problems):
                raise RunFailed(
                    f"cannot write to {self.path}: {max(problems)}; the last metrics "
                    "are lost"
                )

    @contextmanager
    def _failing_as_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(f"cannot write to {self.path}: {_why(error)}") from error


def finish_folder(path: Path) -> None:
    """Does what a run that died at its very end left undone.

    Raises:
      UserError: The folder cannot be written, or is another process's.
    """
    try:
        with lock_folder(path):
            step_folders.tidy(path / CHECKPOINTS)
            write_report(path)
    except OSError as error:
        raise UserError(f"cannot write --workdir={path}: {_why(error)}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"cannot resume: {path} holds no JSON object: remove it")
    return value


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=str)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
