"""jshard.Trainer in a job that the user's program joined."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jshard
from processes import Processes
from resumable import read_metrics
from test_trainer import ROWS, make

pytestmark = pytest.mark.slow


def work(folder: Path) -> dict[str, Any]:
    """Trains until process 1 asks to stop; predicts; goes on."""

    def ask(trainer: jshard.Trainer, step: int, metrics: Any) -> None:
        if step == 3 and jax.process_index() == 1:
            raise jshard.training.StopTraining("enough")

    config = {"checkpoint.every": 100, "log_every": 2, "eval_every": 4}
    trainer = make(folder, on_step=ask, config=config)
    trainer.fit()
    stopped = int(trainer.state.step)
    trainer = make(folder, config=config | {"steps": 10}).fit()
    return {
        "stopped": stopped,
        "step": int(trainer.state.step),
        "rows": trainer.predict({"inputs": ROWS}, lambda model, b: b["inputs"]),
        "evaluated": trainer.evaluate(),
    }


def test_all_processes_stop_alike_and_have_their_rows(tmp_path):
    with Processes(2, 2, tmp_path) as processes:
        first, second = processes.call(work, tmp_path)
    assert first["stopped"] == second["stopped"] == 4  # the next that is logged
    assert first["step"] == second["step"] == 10
    rows = np.concatenate([first["rows"], second["rows"]])
    np.testing.assert_array_equal(rows, ROWS)
    assert first["evaluated"] == second["evaluated"]
    assert read_metrics(tmp_path / "run")[-1]["step"] == 10
