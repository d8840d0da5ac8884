"""Loaders with processes of their own: no row is lost with them, and none is left."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from jobs import MARK, environment, last_step, marked
from resumable import RECIPE, read_metrics

pytestmark = pytest.mark.slow
STEPS = 40
MAP_STYLE = """    data = grain.MapDataset.range(512).map(example)
    if split == "validation":
        return data[:16]
    return data.seed(config.seed).shuffle().repeat()
"""
ROWS = """
import time

import numpy as np


def row(i):
    time.sleep(0.02)
    return {"tokens": np.random.default_rng(i).integers(0, 64, 8, np.int32)}


class Rows:
    def __len__(self):
        return 200  # of which 40 steps need 320

    def __getitem__(self, i):
        return row(i)
"""
GRAIN = """    rows = grain.MapDataset.range(200).seed(3).shuffle().map(row).repeat()
    rows = rows.to_iter_dataset()
    rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=6, seed=1)
    return rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
"""
TORCH = """    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        Rows(),
        batch_size=6,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(3),
        multiprocessing_context=CONTEXT,
    )
"""
# What PyTorch's spawned processes read must be in a module of its own.
RECIPES = {
    "grain": ROWS + RECIPE.replace(MAP_STYLE, GRAIN),
    "torch": ROWS + RECIPE.replace(MAP_STYLE, TORCH.replace("CONTEXT", "'fork'")),
    "torch, spawned": "from rows import Rows\n"
    + RECIPE.replace(MAP_STYLE, TORCH.replace("CONTEXT", "'spawn'")),
}


class Run:
    """A run in a session of its own, as in a terminal."""

    def __init__(self, folder: Path, workdir: str):
        self.folder, self.run, self.mark = folder, folder / workdir, uuid.uuid4().hex
        keys = {"steps": STEPS, "eval_every": 0, "model.noise": 0}
        words = [f"--config.{key}={value}" for key, value in keys.items()]
        words.append(f"--workdir={workdir}")
        with (folder / "out").open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jshard.train", "--config=tiny.py", *words],
                cwd=folder,
                env=environment() | {MARK: self.mark},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 300
        while last_step(self.run / "metrics.jsonl") < step:
            assert self.process.poll() is None, (self.folder / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ends_with(self, code: int) -> str:
        assert self.process.wait(300) == code, (self.folder / "out").read_text()
        deadline = time.monotonic() + 40
        while marked(self.mark):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.1)
        return (self.folder / "out").read_text()


@pytest.fixture
def start(tmp_path):
    """Starts runs, of which none outlives the test."""
    runs: list[Run] = []

    def start(workdir: str) -> Run:
        runs.append(Run(tmp_path, workdir))
        return runs[-1]

    yield start
    for run in runs:
        for pid in marked(run.mark):
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


def ignores_ctrl_c(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored & 1 << signal.SIGINT - 1)


@pytest.mark.parametrize("loader", RECIPES)
def test_killed_and_interrupted_it_goes_on_where_it_was(loader, start, tmp_path):
    if "torch" in loader and not importlib.util.find_spec("torchdata"):
        pytest.skip("needs torchdata, of jshard[huggingface]")
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "tiny.py").write_text(RECIPES[loader])
    said = start("whole").ends_with(0)
    assert "a resumed run continues where it stopped" in said
    assert "Traceback" not in said
    early = start("early")
    early.wait_for_step(
        3
    )  # while the processes read that began before the run listened
    loaders = [pid for pid in marked(early.mark) if pid != early.process.pid]
    assert loaders
    assert all(map(ignores_ctrl_c, loaders))
    os.killpg(early.process.pid, signal.SIGINT)
    assert "SIGINT at step" in early.ends_with(75)
    killed = start("run")
    killed.wait_for_step(10)
    os.kill(killed.process.pid, signal.SIGKILL)
    # At once: what it forked has not noticed yet.
    again = start("run")
    again.wait_for_step(20)
    os.killpg(again.process.pid, signal.SIGINT)  # Ctrl-C reaches all processes
    assert "SIGINT at step" in again.ends_with(75)
    killed.ends_with(-signal.SIGKILL)
    assert "resuming run after step" in start("run").ends_with(0)
    got, whole = (read_metrics(tmp_path / name) for name in ("run", "whole"))
    assert got == whole  # bit for bit
    assert len(got) == STEPS
