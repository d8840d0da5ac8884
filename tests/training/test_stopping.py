"""Runs that a signal hits at any moment: done, saved to go on, or ended at once."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import resumable
from jshard.recipe.config.run_config import check, complete
from jshard.recipe.load import open_recipe
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.cli.command import run_command
from jshard.system.errors import Interrupted, Preempted, RunFailed
from jshard.system.jobs.peers import Peers
from jshard.training.callbacks import stopping
from jshard.training.callbacks.preemption import Preemption
from jshard.training.run import metrics
from jshard.training.trainer import Trainer, fit_since
from processes import Processes

STEPS = 4
RECIPE = """\
import grain
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard


def get_config():
    return ConfigDict({"steps": 4, "batch_size": 8, "eval_every": 2, "log_every": 1})


def make_model(config, rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def make_optimizer(config):
    return optax.sgd(1e-2)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(model(batch["x"]) ** 2), len(batch["x"]))


def make_data(config, split):
    data = grain.MapDataset.range(16).map(lambda i: {"x": np.ones(4, np.float32)})
    return data if split == "validation" else data.repeat()


def generate(model, prompts):
    return model(prompts).astype(jnp.int32)


def sample(config):
    return generate, np.ones((1, 4), np.float32), lambda tokens: "a sample"
"""


def train(folder: Path, peers: Peers | None = None, every: int = 0, **keys) -> None:
    (folder / "tiny.py").write_text(RECIPE)
    with open_recipe(folder / "tiny.py") as recipe:
        config = complete(recipe.get_config(), "tiny.py")
        config.checkpoint.every = every
        config.update(keys)
        check(config)
        trainer = Trainer(recipe, config=config, workdir=folder / "run", peers=peers)
        fit_since(trainer, keeps_state=False)


class Ended(BaseException):
    """What stands for the end of a process that does not listen."""


class Hit(Peers):
    """Sends SIGTERM to this process at a place of a run, and waits until it is heard.

    It stands for the run's Preemption, too, to see that.
    """

    def __init__(self, phase: str, step: int):
        self.place = phase, step
        self.preemption: Preemption | None = None

    def at(self, phase: str, step: int) -> None:
        if (phase, step) == self.place:
            self.send()

    def send(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while self.preemption is None or self.preemption.signal_name is None:
            time.sleep(0.001)  # where Python's own handler runs
            assert time.monotonic() < deadline

    def listen(self, **options) -> Preemption:
        self.preemption = Preemption(**options)
        return self.preemption


@pytest.fixture
def ending():
    """SIGTERM ends what does not listen to it, as by default."""

    def end(number, frame):
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


def end_of(folder: Path, phase: str, step: int, **keys) -> str:
    """How a run ends that is hit at a place: what is raised, or "done"."""
    hit = Hit(phase, step)
    write_report = metrics.write_report

    def report(workdir: Path) -> None:
        if phase == "reporting":  # the last thing a run does
            hit.send()
        write_report(workdir)

    with (
        mock.patch.object(stopping, "Preemption", hit.listen),
        mock.patch.object(metrics, "write_report", report),
    ):
        try:
            train(folder, hit, **keys)
        except (Ended, RunFailed, Preempted) as error:
            return f"{type(error).__name__} {error}".partition(":")[0].strip()
    return "done"


LAST = [(phase, STEPS) for phase in ("step", "evaluating", "sampling", "finishing")]


@pytest.mark.quick("reporting-4-0")
@pytest.mark.usefixtures("ending", "compiled_once")
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize(("phase", "step"), [*LAST, ("saving", 4), ("reporting", 4)])
def test_a_signal_in_the_last_step_or_after_it_ends_a_run_as_done(
    every, phase, step, tmp_path
):
    if phase == "saving" and not every:
        return
    keys = {"eval_every": 0} if phase == "reporting" else {}
    assert end_of(tmp_path, phase, step, every=every, **keys) == "done"
    assert "a sample" in (tmp_path / "run/report.html").read_text()
    assert find_steps(tmp_path / "run/checkpoints") == ([3, 4] if every else [])


@pytest.mark.usefixtures("ending", "compiled_once")
def test_a_run_of_one_step_that_is_hit_while_it_compiles_is_done(tmp_path):
    assert end_of(tmp_path, "compiling", 1, steps=1) == "done"


@pytest.mark.slow  # test_failing_runs.py saves and exits 75
@pytest.mark.usefixtures("ending", "compiled_once")
@pytest.mark.parametrize(
    ("phase", "step", "saved"),
    [
        ("making initial values", 0, 1),
        ("compiling", 1, 1),
        ("data", 1, 2),
        ("step", 2, 2),
        ("evaluating", 2, 3),
        ("saving", 2, 3),
        ("data", 3, None),
    ],
)
def test_a_signal_before_the_last_step_saves_and_the_run_goes_on(
    phase, step, saved, tmp_path
):
    end = end_of(tmp_path, phase, step, every=2)
    assert end == (f"Preempted SIGTERM at step {saved}" if saved else "done")
    newest = find_steps(tmp_path / "run/checkpoints")[-1]
    assert newest == (saved or STEPS)
    assert not find_damage(tmp_path / f"run/checkpoints/{newest}")
    train(tmp_path, every=2)
    assert find_steps(tmp_path / "run/checkpoints")[-1] == STEPS


@pytest.mark.quick("compiling", "data")
@pytest.mark.usefixtures("ending", "compiled_once")
@pytest.mark.parametrize(
    ("phase", "step"), [("compiling", 1), ("step", 2), ("evaluating", 2), ("data", 3)]
)
def test_a_signal_to_a_run_that_cannot_save_ends_it_at_once(phase, step, tmp_path):
    assert end_of(tmp_path, phase, step) == "Ended"


# Several processes, which agree on the step.


def end_after(folder: Path, agreed: int) -> str:
    def requested(self: Preemption, step: int) -> bool:
        self.signal_name = "SIGTERM"
        return step == agreed

    with mock.patch.object(Preemption, "requested", requested):
        try:
            train(folder)
        except RunFailed as error:
            return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.slow
def test_processes_that_agree_on_the_last_step_are_done_without_checkpoints(tmp_path):
    with Processes(2, 1, tmp_path) as processes:
        (tmp_path / "last").mkdir()
        assert processes.call(end_after, tmp_path / "last", STEPS) == ["done", "done"]
        (tmp_path / "before").mkdir()
        ends = processes.call(end_after, tmp_path / "before", STEPS - 1)
    why = "SIGTERM at step 3, and checkpoint.every=0 saves nothing"
    assert ends == [f"Interrupted: {why}"] * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SIGINT", "interrupted by SIGINT at step 5, and checkpoint.every=0 saves"),
        ("SIGTERM", "SIGTERM at step 5, and checkpoint.every=0 saves"),
    ],
)
def test_ctrl_c_is_an_interruption_and_a_schedulers_signal_has_its_name(name, said):
    profile = SimpleNamespace(steps="")
    checkpoint = SimpleNamespace(every=0)
    settings = SimpleNamespace(steps=9, checkpoint=checkpoint, profile=profile)
    unused: Any = None
    run: Any = SimpleNamespace(settings=settings)
    log: Any = SimpleNamespace(spikes=0)
    ends = stopping.Stopping(run, unused, keeps_state=True)
    ends._preemption.signal_name = name
    with pytest.raises(Interrupted, match=rf"^{said} .*fit\(\) again continues$"):
        ends.after_step(5, log, unused)


def test_a_run_that_is_interrupted_and_saves_nothing_exits_130(monkeypatch, capsys):
    def command(argv: list[str]) -> None:
        raise Interrupted("SIGTERM at step 3, and checkpoint.every=0 saves nothing")

    monkeypatch.setattr("warnings.formatwarning", None)
    with pytest.raises(SystemExit, match="130"):
        run_command(command)
    assert capsys.readouterr().err.startswith("jshard: error: SIGTERM at step 3")


@pytest.mark.slow  # by default test_failing_runs.py has a run that exits with 75
def test_a_signal_saves_the_step_it_comes_in(tmp_path, capsys):
    def signal_when_it_runs() -> None:
        metrics = tmp_path / "run/metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if metrics.exists() and metrics.stat().st_size:
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    thread = threading.Thread(target=signal_when_it_runs)
    thread.start()
    with pytest.raises(Preempted) as preempted:
        resumable.train(tmp_path, steps=100_000, checkpoint__every=90_000)
    thread.join()
    (step,) = find_steps(tmp_path / "run/checkpoints")
    assert f"SIGTERM at step {step}: saved" in str(preempted.value)
    assert not find_damage(tmp_path / f"run/checkpoints/{step}")
