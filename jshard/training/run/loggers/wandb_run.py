"""A run in Weights & Biases; its environment variables set everything else."""

import html
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]  # an extra

from jshard.training.run.loggers.tracker import Tracker


class WandbRun(Tracker):
    """A run of a project, named like the run's folder."""

    def __init__(
        self, project: str, path: Path, config: Mapping[str, Any], id: str | None
    ):
        # Offline there is no run to resume: a new one with the same id is appended
        # when both are synced.
        self._run: Any = wandb.init(
            project=project,
            name=path.name,
            dir=str(path),
            config=dict(config),
            id=id,
            resume="allow" if id else None,
        )
        self.id: str = self._run.id
        # Saves are reported after later steps; W&B's own steps only rise.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step; their time is that of the call."""
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text."""
        page = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._run.log({"step": step, name: page})

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""
        if importlib.util.find_spec("PIL") is None:  # which wandb.Image needs
            raise ModuleNotFoundError("pictures need Pillow: pip install pillow")
        self._run.log({"step": step, name: wandb.Image(str(file))})

    def close(self, *, failed: bool) -> None:
        """Ends the run."""
        self._run.finish(exit_code=int(failed))
