"""What a run logs to: TensorBoard, and the services of `logger.wandb` and `.mlflow`."""

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard.recipe.config.settings import LoggerSettings
from jshard.system.errors import UserError, warn
from jshard.training.run.background import PATIENCE, Background
from jshard.training.run.loggers.tracker import Tracker

_REST = 1.0  # seconds between requests
_PATIENCE = 1.0  # seconds that a checkpoint waits for a service


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

    One that fails, at the start or later, is left out after a warning.

    `values` are all keys of the run, flattened. `ids` are those of the runs to go on
    with, by service; a new run has no `resume_from`, the step after which it resumes.
    `own` is the recipe's `tracker`, called with its config.

    Attributes:
      ids: Of the runs in the services, also of those that could not be gone on with.

    Raises:
      UserError: `own` returns no Tracker.
    """

    def __init__(
        self,
        settings: LoggerSettings,
        values: Mapping[str, Any],
        path: Path,
        ids: Mapping[str, str],
        resume_from: int | None = None,
        own: Callable[[], Any] | None = None,
    ):
        self._loggers: dict[str, Tracker] = {}
        self.ids = dict(ids)
        for name, given in _chosen(settings).items():
            try:
                service = _open(name)(given, path, values, ids.get(name))
            except Exception as error:  # whatever a package or its server raises
                _warn(f"--config.logger.{name}={given}", error)
                continue
            self._loggers[name], self.ids[name] = service, service.id
        if own is not None:
            try:
                tracker = own()
            except Exception as error:
                _warn("tracker(config)", error)
            else:
                self._loggers["tracker"] = _checked(tracker)
        # Here, as other processes do not log.
        from jshard.training.run.loggers.tensorboard_run import TensorboardRun

        self._loggers["TensorBoard"] = TensorboardRun(path, values, resume_from)
        self._threads = {
            name: Background(functools.partial(_act, logger), _REST, f"jshard-{name}")
            for name, logger in self._loggers.items()
        }

    def each(self, act: Callable[[Tracker], None]) -> None:
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


def _checked(tracker: Any) -> Tracker:
    if isinstance(tracker, Tracker):
        return tracker
    raise UserError(
        f"tracker(config) returned {tracker!r}; it must return an object of a subclass "
        "of jshard.training.Tracker"
    )


def _warn(name: str, error: Exception) -> None:
    warn(f"{name}: {_why(error)}; training continues without it")


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _act(logger: Tracker, acts: Sequence[Callable[[Tracker], None]]) -> None:
    for act in acts:
        act(logger)
    logger.send()


def _chosen(settings: LoggerSettings) -> dict[str, str]:
    given = dataclasses.asdict(settings)
    return {name: given[name] for name in sorted(given) if given[name]}


def _open(name: str) -> Callable[..., Any]:
    """Returns the class of a service's run, a Tracker whose `id` is to go on with."""
    # Large imports, only where they are needed.
    if name == "wandb":
        from jshard.training.run.loggers.wandb_run import WandbRun

        return WandbRun
    from jshard.training.run.loggers.mlflow_run import MlflowRun

    return MlflowRun
