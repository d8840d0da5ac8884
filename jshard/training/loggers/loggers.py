"""The services of a run's config: `logger.wandb` and `logger.mlflow`."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jshard.errors import UserError
from jshard.training.config.config import Config, flatten


class Logger(Protocol):
    """A run in a service."""

    id: str  # to go on with

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""

    def close(self, *, failed: bool) -> None:
        """Ends the run, and waits until all is sent."""


# The package of each service, which is an extra of the same name.
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def check_loggers(config: Config) -> None:
    """Raises a UserError if the package of a service is not installed."""
    for name in _chosen(config):
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"--config.logger.{name} needs the package {_PACKAGES[name]}: "
                f"pip install 'jshard[{name}]'"
            )


class Loggers:
    """The loggers of a run. One that fails is left out after a warning.

    Args:
      config: The run's config.
      path: The run's folder.
      ids: Of the runs to go on with, by service.

    Attributes:
      ids: Of the runs in the services.

    Raises:
      UserError: A service does not let the run begin.
    """

    def __init__(self, config: Config, path: Path, ids: Mapping[str, str]):
        self._loggers: dict[str, Logger] = {}
        for name, given in _chosen(config).items():
            try:
                self._loggers[name] = _open(name)(
                    given, path, flatten(config), ids.get(name)
                )
            except Exception as error:
                why = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"--config.logger.{name}={given}: {why}") from error
        self.ids = {name: logger.id for name, logger in self._loggers.items()}

    def each(self, act: Callable[[Logger], None]) -> None:
        """Calls a function with each logger."""
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:
                del self._loggers[name]
                why = " ".join(str(error).split()) or type(error).__name__
                warnings.warn(
                    f"logger.{name}: {why}; training continues without it", stacklevel=3
                )


def _chosen(config: Config) -> dict[str, Any]:
    group = config.get("logger", {})
    return {name: group[name] for name in group if group[name]}


def _open(name: str) -> Callable[..., Logger]:
    # Large imports, only where they are needed.
    if name == "wandb":
        from jshard.training.loggers.wandb_run import WandbRun

        return WandbRun
    from jshard.training.loggers.mlflow_run import MlflowRun

    return MlflowRun
