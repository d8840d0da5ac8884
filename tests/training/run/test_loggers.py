"""Runs logged elsewhere: what is sent, and that a service cannot end a run."""

import importlib.util
import json
import re
import sqlite3
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from jshard.recipe.config.run_config import complete
from jshard.recipe.config.settings import LoggerSettings, settings_of
from jshard.system.errors import UserError
from jshard.training.run.loggers import services
from jshard.training.run.loggers.tracker import Tracker
from jshard.training.run.metrics import RunFolder

REPOSITORY = Path(__file__).parents[3]


def open_folder(path, resume_from=None, **logger):
    given = {"steps": 3, "batch_size": 2, "logger": logger}
    config = complete(ConfigDict(given), "test")
    chosen = settings_of(config).logger
    return RunFolder(path, config.to_dict(), logger=chosen, resume_from=resume_from)


class FakeRun:
    """Keeps what a run of wandb is given."""

    def __init__(self, **given):
        self.given, self.lines, self.ended = given, [], None
        self.id = given["id"] or "abc"

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, values):
        if values.get("loss") == 13:
            raise RuntimeError("the server is gone")
        self.lines.append(values)

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def runs(monkeypatch):
    """A package wandb that keeps its runs here."""
    runs = []

    def init(**given):
        if given["project"] == "locked":
            raise RuntimeError("no such\nproject")
        runs.append(FakeRun(**given))
        return runs[-1]

    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None)
    fake.init, fake.Html, fake.Image = init, str, str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "jshard.training.run.loggers.wandb_run", False)
    yield runs
    sys.modules.pop("jshard.training.run.loggers.wandb_run", None)


def test_metrics_hyperparameters_and_text_are_sent_and_the_run_goes_on(runs, tmp_path):
    with open_folder(tmp_path, wandb="mine") as folder:
        folder.write(1, {"loss": 2.0, "odd": float("nan")})
        folder.log(1, {"own": 3.0, "said": "<hi>"})
    (run,) = runs
    assert run.given["project"] == "mine"
    assert run.given["config"]["batch_size"] == 2
    assert run.lines[:2] == [{"step": 1, "loss": 2.0}, {"step": 1, "own": 3.0}]
    assert run.lines[2] == {"step": 1, "said": "<pre>&lt;hi&gt;</pre>"}
    assert run.ended == 0
    with open_folder(tmp_path, 1, wandb="mine"):
        pass
    assert runs[1].given["id"] == "abc"


def test_a_service_that_fails_costs_a_warning(runs, tmp_path):
    with open_folder(tmp_path, wandb="mine") as folder:
        folder.write(1, {"loss": 13.0})
        with pytest.warns(UserWarning, match=r"wandb: the server is gone; training co"):
            folder.flush()
        folder.write(2, {"loss": 1.0})
    assert runs[0].lines == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("hangs", ["log", "finish"])
def test_a_service_that_does_not_answer_is_left_behind_with_a_line(
    hangs, runs, tmp_path, monkeypatch
):
    monkeypatch.setattr(services, "PATIENCE", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(FakeRun, hangs, lambda *args, **given: answer.wait(10))
    said = "wandb has not answered for 0 s: the run ends without it"
    given = open_folder(tmp_path, wandb="mine")
    with pytest.warns(UserWarning, match=said), given as folder:
        folder.write(1, {"loss": 2.0})
    assert list(tmp_path.glob("events.*"))
    answer.set()


def test_a_service_that_does_not_begin_costs_one_warning_and_keeps_its_id(
    runs, tmp_path
):
    """By the next start the server may be back, and the run goes on there."""
    with open_folder(tmp_path, wandb="mine"):
        pass
    said = r"logger\.wandb=locked: no such project; training continues without it$"
    with pytest.warns(UserWarning, match=said) as warned:
        folder = open_folder(tmp_path, 1, wandb="locked")
    assert len(warned) == 1
    assert folder._loggers.ids == {"wandb": "abc"}
    with folder:
        folder.write(2, {"loss": 1.0})
    assert '"loss": 1.0' in (tmp_path / "metrics.jsonl").read_text()
    with open_folder(tmp_path, 2, wandb="mine"):
        pass
    assert runs[-1].given["id"] == "abc"


@pytest.mark.parametrize("kind", ["import", "server"])
def test_an_mlflow_that_cannot_start_costs_one_warning(kind, tmp_path, monkeypatch):
    """mlflow-skinny lacks what its default store imports; a server may be away."""

    class MlflowClient:
        def get_experiment_by_name(self, name):
            raise ConnectionError("no server at\nlocalhost:5000")

    fake, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    if kind == "server":
        fake.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    entities.Metric = entities.Param = tuple  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    module = "jshard.training.run.loggers.mlflow_run"
    monkeypatch.delitem(sys.modules, module, False)
    why = {"import": "cannot import name", "server": "no server at localhost:5000"}
    with pytest.warns(UserWarning, match=f"logger.mlflow=mine: {why[kind]}.*continues"):
        folder = open_folder(tmp_path, mlflow="mine")
    sys.modules.pop(module, None)
    with folder:
        folder.write(1, {"loss": 2.0})
    assert '"loss": 2.0' in (tmp_path / "metrics.jsonl").read_text()
    assert list(tmp_path.glob("events.*"))


def test_a_service_whose_package_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jshard\[mlflow\]'"):
        services.check_loggers(LoggerSettings(mlflow="mine"))


class Lines(Tracker):
    """A tracker of a user's, which wants numbers alone."""

    def __init__(self):
        self.lines, self.ended = [], None

    def log(self, step, when, values):
        self.lines.append((step, dict(values)))

    def close(self, *, failed):
        self.ended = failed


def with_tracker(path, tracker):
    return RunFolder(path, {"steps": 3}, tracker=tracker)


def test_a_tracker_of_a_recipes_own_gets_what_services_get(tmp_path):
    own = Lines()
    with with_tracker(tmp_path / "a", lambda: own) as folder:
        folder.write(1, {"loss": 2.0})
        folder.log(1, {"said": "hi", "drawn": np.ones((2, 3, 3))})
    assert own.lines == [(1, {"loss": 2.0})]
    assert own.ended is False

    def fail():
        raise ConnectionError("no server")

    with pytest.warns(
        UserWarning, match=r"^tracker\(config\): no server; training con"
    ):
        folder = with_tracker(tmp_path / "b", fail)
    with folder:
        folder.write(1, {"loss": 2.0})
    with pytest.raises(UserError, match=r"returned \[\]; .*jshard\.training\.Tracker$"):
        with_tracker(tmp_path / "c", list)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of these packages
def test_the_real_packages_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = {"wandb": "mine", "mlflow": "mine"}
    for resume_from in (None, 2):
        with open_folder(tmp_path / "run", resume_from, **given) as folder:
            step = (resume_from or 0) + 1
            folder.write(step, {"loss": 1.0 / step})
            folder.log(step, {"drawn": np.ones((2, 3, 3)), "said": "hello"})
    notes = json.loads((tmp_path / "run/notes.json").read_text())
    (run,) = mlflow.MlflowClient().search_runs(
        [mlflow.MlflowClient().get_experiment_by_name("mine").experiment_id]
    )
    assert run.info.run_id == notes["loggers"]["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "2"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (3, 1 / 3)]
    assert list((tmp_path / "run/wandb").glob("offline-run-*"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of these packages
def test_the_page_s_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by its import
    pytest.importorskip("trackio")
    page = (REPOSITORY / "docs/how_to/metrics.md").read_text()
    [block] = re.findall(r"```python\n(import trackio\n.*?)```", page, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(block, defined)
    config = ConfigDict({"steps": 3})
    with with_tracker(tmp_path / "run", lambda: defined["tracker"](config)) as folder:
        folder.write(1, {"loss": 2.0})
        folder.write(2, {"loss": 1.0})
    with sqlite3.connect(tmp_path / "trackio/mine.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    assert [(n, json.loads(x)["loss"]) for n, x in rows] == [(1, 2.0), (2, 1.0)]
