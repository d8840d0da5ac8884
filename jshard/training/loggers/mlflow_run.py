"""A run in MLflow; MLFLOW_TRACKING_URI says where."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Extras; the client alone, so that the user's own active run is left alone.
from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

_METRICS, _PARAMS = 1000, 100  # most in one request
_EVERY = 1.0  # seconds between requests
_LONGEST = 500  # characters of a value


class MlflowRun:
    """A run of an experiment, named like the run's folder. See `loggers.Logger`."""

    def __init__(
        self, experiment: str, path: Path, config: Mapping[str, Any], id: str | None
    ):
        self._client: Any = MlflowClient()
        self._sent: Any = None  # the last metrics
        self._waiting: list[Metric] = []
        self._last_sent = time.monotonic()
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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        now = int(time.time() * 1000)
        self._waiting += [Metric(k, value, now, step) for k, value in values.items()]
        late = time.monotonic() > self._last_sent + _EVERY
        if late or len(self._waiting) > _METRICS - _PARAMS:
            self._send()

    def _send(self) -> None:
        """Hands what waits to a thread: a server may take longer than a step."""
        for first in range(0, len(self._waiting), _METRICS):
            some = self._waiting[first : first + _METRICS]
            self._sent = self._client.log_batch(
                self.id, metrics=some, synchronous=False
            )
        self._waiting, self._last_sent = [], time.monotonic()

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""
        self._client.log_text(self.id, text, f"{name}-{step}.txt")

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""
        self._client.log_artifact(self.id, str(file), name)

    def close(self, *, failed: bool) -> None:
        """Ends the run."""
        self._send()
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")
