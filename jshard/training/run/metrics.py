"""A run's folder: what a run leaves on disk while it trains."""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jshard.recipe.changes import FITTED_ON, NOTES, read_notes
from jshard.recipe.config.run_config import flatten
from jshard.recipe.config.settings import LoggerSettings
from jshard.storage.checkpoint import step_folders
from jshard.storage.checkpoint.restore import CHECKPOINTS
from jshard.system.errors import Preempted, RunFailed, UserError, warn
from jshard.system.files.atomic import replace_file
from jshard.system.files.lock import lock_folder
from jshard.system.pages.png import png
from jshard.training.report.run_report import (
    GENERATED,
    REPORT,
    SAMPLES,
    write_report,
)
from jshard.training.run.append import AppendedFile
from jshard.training.run.loggers.services import Loggers
from jshard.training.run.metrics_lines import METRICS, NEWEST, Line, cut_back

_MOST_GENERATED = 200  # texts; of more every second is left out

_NO_LOGGER = LoggerSettings()
LOGGERS = "loggers"  # the note of a run's ids in services


class RunFolder(AbstractContextManager):
    """Writes a run's config, metrics, notes, TensorBoard events and report.

    Metrics are written without a delay, so that a run that is killed keeps them;
    TensorBoard and other services get them in threads, and at the latest before a
    checkpoint is saved. If the disk is full, it warns and writes the metrics as soon as
    possible; TensorBoard's events end there. As a context manager it locks the folder,
    and leaves a report however the run ends.

    Args:
      path: The folder; made if it does not exist.
      config: All keys of the run's config, nested.
      logger: The services that it logs to.
      tracker: Makes the recipe's own tracker; None if it has none.
      recipe: The recipe's name.
      fitted_on: The devices for which keys of the config were chosen, in words; empty
        if none were.
      resume_from: The step after which the folder's run resumes; lines of later steps
        are dropped. 0 starts it again; None is a new run.
      restored: The newest lines of metrics, if the folder's file lacks some of them.
      enabled: False writes nothing, as in all processes but the first.

    Attributes:
      path: The folder.
      recorded: The config as it is written, with the recipe's name as `recipe`.
      reached: The last step that earlier attempts at the run have metrics of.

    Raises:
      UserError: The folder cannot be written, is locked by another process, or holds
        another run's metrics or some that cannot be read. Nothing is changed then.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        *,
        logger: LoggerSettings = _NO_LOGGER,
        tracker: Callable[[], Any] | None = None,
        recipe: str = "",
        fitted_on: str = "",
        resume_from: int | None = None,
        restored: Sequence[Line] = (),
        enabled: bool = True,
    ):
        self.path = path
        self._given, self._logger, self._tracker = config, logger, tracker
        self.recorded: dict[str, Any] = {"recipe": recipe, **config}
        if fitted_on:
            self.recorded[FITTED_ON] = fitted_on
        self.reached = 0
        self._enabled = enabled
        self._notes: dict[str, Any] = {}
        self._waits = False  # for a disk that is full
        self._next_report = 0.0
        if not enabled:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                self._lock = undo.enter_context(lock_folder(path))
                self._place = os.open(path, os.O_RDONLY)
                undo.callback(os.close, self._place)
                self._open(resume_from, restored)
                undo.pop_all()
        except OSError as error:
            raise UserError(f"cannot write --workdir={path}: {_why(error)}") from error

    def _open(self, resume_from: int | None, restored: Sequence[Line]) -> None:
        metrics = self.path / METRICS
        page = self.path / REPORT
        if page.is_dir():  # otherwise the run would fail at its end
            raise UserError(
                f"{page} is a folder where the report should be: give another --workdir"
            )
        if resume_from is not None:
            self._notes = read_notes(self.path)
            self.reached = cut_back(self.path, resume_from, restored)
            self._notes["resumed"] = [*self._notes.get("resumed", []), resume_from]
            replace_file(self.path / NOTES, _json(self._notes, indent=2))
        elif metrics.exists() and metrics.stat().st_size:
            raise UserError(
                f"--workdir={self.path} already holds a run, and no checkpoint "
                "to resume it from: give another"
            )
        ids = self._notes.get(LOGGERS, {}) if resume_from else {}
        values, own = flatten(self._given), self._tracker
        self._loggers = Loggers(self._logger, values, self.path, ids, resume_from, own)
        replace_file(self.path / "config.json", _json(self.recorded, indent=2))
        self._metrics = AppendedFile(metrics)
        if self._loggers.ids:
            self.note(**{LOGGERS: self._loggers.ids})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line of metrics, with the `time` in seconds since 1970.

        A value that is not finite becomes null.
        """
        if self._enabled:
            finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
            now = round(time.time(), 3)
            line = _json({"step": step, "time": now, **finite}) + "\n"
            self._warn(self._metrics.write(line.encode()))
            known = {k: v for k, v in finite.items() if v is not None}
            self._loggers.each(lambda logger: logger.log(step, now, known))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes what a hook returned: numbers, texts, pictures [height, width(, 3)].

        The report shows the newest text or picture of a name.
        """
        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        if numbers:
            self.write(step, numbers)
        for name, value in values.items() if self._enabled else ():
            if name not in numbers:
                self._sample(step, name, value)

    def text(self, step: int, name: str, text: str) -> None:
        """Sends a text to TensorBoard and the services."""
        if self._enabled:
            self._loggers.each(lambda logger: logger.text(step, name, text))

    def sample(self, step: int, text: str, loss: float | None = None) -> None:
        """Keeps a text that the model wrote after a step, for the report.

        `loss` is that of the evaluation after the same step, if there was one.
        """
        earlier = [one for one in self._notes.get(GENERATED, []) if one["step"] < step]
        if len(earlier) >= _MOST_GENERATED:
            earlier = earlier[::2]
        new = {"step": step, "eval_loss": loss, "text": text}
        self.note(**{GENERATED: [*earlier, new]})
        self.text(step, "sample", text)

    def _sample(self, step: int, name: str, value: str | np.ndarray) -> None:
        shown: dict[str, Any] = {"step": step}
        if isinstance(value, str):
            shown["text"] = value
            self.text(step, name, value)
        else:
            stem = re.sub(r"[^\w.-]", "-", name)
            path = self.path / SAMPLES / f"{stem}-{step}.png"
            with self._failing_as_one_line():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(png(value))
            shown["picture"] = f"{SAMPLES}/{path.name}"
            self._loggers.each(lambda logger: logger.picture(step, name, path))
        self.note(**{SAMPLES: self._notes.get(SAMPLES, {}) | {name: shown}})

    def newest_metrics(self, copied: int | None = None) -> str:
        """Returns the newest lines, to be saved with a state.

        These are a MiB of them, and all that could be lost otherwise: those that are
        not on the disk yet, or not in the bucket, which has the first `copied` bytes.
        """
        if not self._enabled:
            return ""
        safe = self._metrics.synced if copied is None else copied
        return self._metrics.newest(NEWEST, safe).decode()

    def flush(self) -> None:
        """Waits until all metrics are on the disk, and handed to the services.

        A checkpoint calls this first: a resumed run does not repeat the steps up to it,
        so that lines lost in a power cut would stay lost.

        Raises:
          RunFailed: The folder is gone.
        """
        if self._enabled:
            self._check_there()
            self._warn(self._mend() or self._metrics.sync())
            self._loggers.flush()

    def _mend(self) -> str:
        """Writes metrics again that another program deleted; returns why it cannot."""
        try:
            done = self._metrics.mend()
        except OSError as error:
            return _why(error)
        if done:
            warn(f"{self.path}: {done}")
        return ""

    def _is_there(self) -> bool:
        try:
            same = os.path.samestat(os.fstat(self._place), self.path.stat())
        except OSError:
            return False
        return same and (self.path / "config.json").exists()

    def _check_there(self) -> None:
        """Raises RunFailed if what is saved from now on could not be resumed."""
        if not self._is_there():
            raise RunFailed(
                f"{self.path} was deleted, moved or replaced while the run trained in "
                "it: checkpoints that are saved there now could not be resumed"
            )

    def _warn(self, problem: str) -> None:
        """Warns of a full disk, once until it has room again."""
        if problem and not self._waits:
            warn(
                f"cannot write to {self.path}: {problem}; training continues, and its "
                "metrics wait in memory"
            )
        self._waits = bool(problem)

    def note(self, **notes: Any) -> None:
        """Adds to `notes.json`, which the report shows beside config and metrics."""
        self._notes |= notes
        if self._enabled:
            with self._failing_as_one_line():
                replace_file(self.path / NOTES, _json(self._notes, indent=2))

    def report(self) -> None:
        """Writes `report.html` from the metrics so far.

        A long run's takes seconds: it is skipped where it would cost more than two
        hundredths of the time.
        """
        if self._enabled and time.monotonic() >= self._next_report:
            began = time.monotonic()
            if self._is_there():
                self._warn(self._mend())
            try:
                write_report(self.path)
            except OSError as error:
                self._warn(_why(error))
            took = time.monotonic() - began
            self._next_report = began + 50 * took

    def __exit__(self, kind: Any = None, *exception: object) -> None:
        """Closes the files, writes the report and unlocks the folder.

        Raises:
          RunFailed: The disk is still full, or the folder is gone.
        """
        if not self._enabled:
            return
        failed = kind is not None and not issubclass(kind, Preempted)
        self._loggers.close(failed=failed)
        with ExitStack() as last, self._failing_as_one_line():
            last.enter_context(self._lock)
            last.callback(os.close, self._place)
            problem = self._mend() if self._is_there() else ""
            problem = self._metrics.close() or problem
            if kind is None:
                self._check_there()
            if self._is_there():  # otherwise an error says so
                write_report(self.path)
            if problem:
                raise RunFailed(
                    f"cannot write to {self.path}: {problem}; the last metrics are lost"
                )

    @contextmanager
    def _failing_as_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._check_there()
            raise RunFailed(f"cannot write to {self.path}: {_why(error)}") from error


def finish_folder(path: Path) -> None:
    """Tidies the folder of a finished run, and writes its report.

    Raises:
      UserError: The folder cannot be written, or another process has locked it.
    """
    try:
        with lock_folder(path):
            step_folders.tidy(path / CHECKPOINTS)
            write_report(path)
    except OSError as error:
        raise UserError(f"cannot write --workdir={path}: {_why(error)}") from error


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=str)


def _why(error: OSError) -> str:
    return error.strerror or str(error)
