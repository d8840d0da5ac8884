"""The folder of a run that was killed, and what is in it."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.run_config import complete
from jshard.training.run.metrics import RunFolder


def small_config() -> ConfigDict:
    """A complete config of ten steps."""
    return complete(
        ConfigDict(
            {
                "steps": 10,
                "batch_size": 8,
                "optimizer": {"learning_rate": 0.003, "betas": (0.9, 0.95)},
                "model": {"dropout": 0.0, "widths": (8, (4, 4)), "name": ""},
                "data": {"path": "", "limit": float("nan"), "dtype": float},
                "sample": {},
            }
        ),
        "mlp.py",
    )


def open_folder(path: Path, config: ConfigDict, **given: Any) -> RunFolder:
    return RunFolder(path, config.to_dict(), **given)


def killed_run(path: Path, config: ConfigDict) -> Path:
    """Writes the folder of a run that was killed after its sixth step."""
    with open_folder(path, config) as folder:
        folder.note(recipe="mlp.py", sample="a")
        for step in range(1, 7):
            folder.write(step, {"loss": 1 / step})
        folder.write(4, {"eval_loss": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')
    return folder.path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
