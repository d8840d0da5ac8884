"""A run in MLflow; MLFLOW_TRACKING_URI says where."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Extras; the client alone, so that the user's own active run is left alone.
from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from jshard.training.run.loggers.tracker import Tracker

_METRICS, _PARAMS = 1000, 100  # most in one request
_LONGEST = 500  # characters of a value


class MlflowRun(Tracker):
    """A run of an experiment, named like the run's folder."""

    def __init__(
        self, experiment: str, path: Path, config: Mapping[str, Any], id: str | None
    ):
        self._client: Any = MlflowClient()
        self._waiting: list[Metric] = []
        if id:
            self.id = id
            self._client.update_run(id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = (
            found.experiment_id if found else self._client.create_experiment(experiment)
        )
        run = self._client.create_run(number, run_name=path.name)
        self.id: str = run.info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in config.items()]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[first : first + _PARAMS])

    def log(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step, and the time in seconds since 1970."""
        now = int(when * 1000)
        self._waiting += [Metric(k, value, now, step) for k, value in values.items()]

    def send(self) -> None:
        """Sends the metrics that were added."""
        for first in range(0, len(self._waiting), _METRICS):
            some = self._waiting[first : first + _METRICS]
            self._client.log_batch(self.id, metrics=some)
        self._waiting = []

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""
        self._client.log_text(self.id, text, f"{name}-{step}.txt")

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""
        self._client.log_artifact(self.id, str(file), name)

    def close(self, *, failed: bool) -> None:
        """Ends the run."""
        self.send()
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
