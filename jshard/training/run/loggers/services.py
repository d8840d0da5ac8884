"""What a run logs to: TensorBoard, and the services of `logger.wandb` and `.mlflow`."""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jshard.recipe.config.settings import LoggerSettings
from jshard.system.errors import UserError, warn
from jshard.training.run.background import PATIENCE, Background

_REST = 1.0  # seconds between requests
_PATIENCE = 1.0  # seconds that a checkpoint waits for a service


class Logger(Protocol):
    """A run as one service keeps it."""

    def log(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step, and the time in seconds since 1970."""

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""

    def send(self) -> None:
        """Sends what was added; called after every few additions."""

    def close(self, *, failed: bool) -> None:
        """Ends the run, and waits until all is sent; the last call."""


def check_loggers(settings: LoggerSettings) -> None:
    """Raises a UserError if the package of a service is not installed."""
    for name in _chosen(settings):  # the service's package, and our extra
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--config.logger.{name} needs the package {name}: "
                f"pip install 'jshard[{name}]'"
            )


class Loggers:
    """The loggers of a run, each in a thread: a service may be slow to answer.

    One that fails is left out after a warning.

    `values` are all keys of the run, flattened. `ids` are those of the runs to go on
    with, by service; a new run has no `resume_from`, the step after which it resumes.

    Attributes:
      ids: Of the runs in the services.

    Raises:
      UserError: A service does not let the run begin.
    """

    def __init__(
        self,
        settings: LoggerSettings,
        values: Mapping[str, Any],
        path: Path,
        ids: Mapping[str, str],
        resume_from: int | None = None,
    ):
        self._loggers: dict[str, Logger] = {}
        self.ids: dict[str, str] = {}
        for name, given in _chosen(settings).items():
            try:
                service = _open(name)(given, path, values, ids.get(name))
            except Exception as error:
                raise UserError(
                    f"--config.logger.{name}={given}: {_why(error)}"
                ) from error
            self._loggers[name], self.ids[name] = service, service.id
        # Here, as tensorboardX imports PyTorch where it is, and other processes do not
        # log.
        from jshard.training.run.loggers.tensorboard_run import TensorboardRun

        self._loggers["TensorBoard"] = TensorboardRun(path, values, resume_from)
        self._threads = {
            name: Background(functools.partial(_act, logger), _REST, f"jshard-{name}")
            for name, logger in self._loggers.items()
        }

    def each(self, act: Callable[[Logger], None]) -> None:
        """Calls a function with each logger, in its thread."""
        self._leave_out()
        for thread in self._threads.values():
            thread.put(act)

    def flush(self) -> None:
        """Waits until each has been called, but for no service that does not answer."""
        for thread in self._threads.values():
            thread.drain(_PATIENCE)
        self._leave_out()

    def close(self, *, failed: bool) -> None:
        """Ends the runs in the services; waits a minute for all of them together."""
        until = time.monotonic() + PATIENCE
        for name, thread in self._threads.items():
            thread.end(functools.partial(self._loggers[name].close, failed=failed))
        for name, thread in list(self._threads.items()):
            if not thread.close(max(until - time.monotonic(), 0.0)):
                del self._threads[name]
                warn(
                    f"{name} has not answered for {PATIENCE:.0f} s: the run ends "
                    "without it, and the last metrics may be missing there"
                )
        self._leave_out()

    def _leave_out(self) -> None:
        """Warns of loggers that failed, and leaves them out."""
        for name, thread in list(self._threads.items()):
            if thread.error is not None:
                del self._threads[name]
                _warn(name, thread.error)


def _warn(name: str, error: Exception) -> None:
    warn(f"{name}: {_why(error)}; training continues without it")


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _act(logger: Logger, acts: Sequence[Callable[[Logger], None]]) -> None:
    for act in acts:
        act(logger)
    logger.send()


def _chosen(settings: LoggerSettings) -> dict[str, str]:
    given = dataclasses.asdict(settings)
    return {name: given[name] for name in sorted(given) if given[name]}


def _open(name: str) -> Callable[..., Any]:
    """Returns the class of a service's run, a Logger whose `id` is to go on with."""
    # Large imports, only where they are needed.
    if name == "wandb":
        from jshard.training.run.loggers.wandb_run import WandbRun

        return WandbRun
    from jshard.training.run.loggers.mlflow_run import MlflowRun

    return MlflowRun
