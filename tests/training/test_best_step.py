"""The best checkpoint of a run: named, marked and used wherever a run is taken."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from bucket_servers import Folder, running
from jshard import report
from jshard.storage.checkpoint.selected.best_step import best_of
from jshard.system.errors import Preempted, UserError

pytestmark = pytest.mark.usefixtures("compiled_once")

# The parameter goes from 0 to 4 by a fifth of the way: past 1, where the validation
# data are, after step 1.
TRAINED, EVALUATED = 4.0, 1.0
CONFIG = {
    "steps": 3, "batch_size": 4, "eval_every": 1, "log_every": 8, "checkpoint.every": 8,
    "checkpoint.keep": 1, "checkpoint.best": "eval_loss",
}  # fmt: skip
BEST, LAST = 1, 3


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.at = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * 0 + self.at[...]


def loss_fn(model, batch):
    x = batch["inputs"]
    return jshard.Mean(jnp.sum((model(x) - x) ** 2), x.size)


def make(workdir: str | Path, **given: Any) -> jshard.Trainer:
    rows = {"train_data": TRAINED, "validation_data": EVALUATED}
    parts: dict[str, Any] = {
        "make_model": lambda config, rngs: Model(rngs),
        "make_optimizer": lambda config: optax.sgd(0.1),
        "loss_fn": loss_fn,
        **{x: {"inputs": np.full(8, at, np.float32)} for x, at in rows.items()},
    }
    mesh = jshard.make_mesh(devices=jax.devices()[:2])
    config = CONFIG | given.pop("config", {})
    return jshard.Trainer(config=config, workdir=workdir, mesh=mesh, **(parts | given))


def at(step: int) -> float:
    return TRAINED * (1 - 0.8**step)


def where(trainer: jshard.Trainer) -> tuple[int, float]:
    state: Any = trainer.state
    return int(state.step), float(state.params["at"][...])


def reached(step: int) -> tuple[int, Any]:
    return step, pytest.approx(at(step), rel=1e-5)


def steps_of(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A run's folder, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("runs") / "mine", io.StringIO()
    with contextlib.redirect_stdout(printed):
        make(folder).fit()
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def run(finished) -> Path:
    return finished[0]


def loss_at(step: int) -> float:
    return (at(step) - EVALUATED) ** 2


def test_a_runs_last_line_names_its_best_step_whenever_it_is_started(finished, capsys):
    folder, printed = finished
    line = f"best: step {BEST}, eval_loss {loss_at(BEST):.4g}"
    assert printed.splitlines()[-1] == line
    assert steps_of(folder) == {"1", "3"}
    make(folder).fit()
    nothing, last = capsys.readouterr().out.splitlines()
    assert (nothing.split(":")[0], last) == ("nothing to do", line)


def test_evaluate_predict_and_the_state_are_of_the_step_that_is_named(run):
    trainer = make(run)
    assert where(trainer) == reached(LAST)
    assert trainer.evaluate(step="best")["eval_loss"] == pytest.approx(loss_at(BEST))
    assert where(trainer) == reached(BEST)
    rows = trainer.predict({"inputs": np.zeros(4, np.float32)}, step=LAST)
    np.testing.assert_allclose(rows, np.full(4, at(LAST)), rtol=1e-5)
    assert where(trainer) == reached(LAST)
    rows = trainer.predict("validation", step="1")
    np.testing.assert_allclose(rows, np.full(8, at(1)), rtol=1e-5)
    with pytest.raises(UserError, match="no checkpoint of step 2; it has 1, 3"):
        trainer.test({"inputs": np.zeros(4, np.float32)}, step=2)


@pytest.mark.quick("best")
@pytest.mark.parametrize("step", ["best", "newest"])
def test_after_another_step_was_evaluated_fit_goes_on_from_the_newest(
    step, run, tmp_path
):
    folder = shutil.copytree(run, tmp_path / "run")
    trainer = make(folder, config={"steps": LAST + 1})
    trainer.evaluate(step=step)
    trainer.fit()
    assert where(trainer) == reached(LAST + 1)
    assert [x["step"] for x in trainer.metrics if "loss" in x] == [1, 2, 3, 4]


def test_a_key_ends_fit_with_the_best_state(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    trainer = make(folder, config={"checkpoint.load_best": True}).fit()
    assert where(trainer) == reached(BEST)  # though it was at its end
    config = {"checkpoint.load_best": True, "checkpoint.best": ""}
    with pytest.raises(UserError, match=r"load_best=True: needs --config.checkpoint.b"):
        make(tmp_path / "other", config=config)


@pytest.mark.parametrize("step", ["best", "1", "newest"])
def test_a_new_run_restores_the_step_that_is_named(step, run, tmp_path):
    config = {"steps": 1, "checkpoint.restore": f"{run}@{step}"}
    config |= {"checkpoint.every": 0, "checkpoint.best": "", "eval_every": 0}
    trainer = make(tmp_path / "run", config=config).fit()
    start = at(LAST if step == "newest" else 1)
    _, got = where(trainer)
    assert got == pytest.approx(0.8 * start + 0.2 * TRAINED, rel=1e-5)


def test_the_report_marks_the_best_and_is_written_of_a_step(run, tmp_path, capsys):
    best = f"best: eval_loss {loss_at(BEST):.4g}"
    for words, name in ([], "report.html"), (["--step=3"], "report-3.html"):
        report._report([str(run), *words])
        page = (run / name).read_text()
        assert f"{BEST}, {best}" in page
        assert f"best eval_loss, at step {BEST}" in page
    report._report([f"{run}@best", f"--output={tmp_path / 'best.html'}"])
    page = (tmp_path / "best.html").read_text()
    assert f"validation loss at step {BEST}" in page
    assert f"{BEST}, {best}" in page
    with pytest.raises(UserError, match="is not a run's folder: it has no metrics"):
        report._report([str(run / "checkpoints")])


def test_what_is_evaluated_after_a_signal_can_still_be_the_best(tmp_path, monkeypatch):
    asked = "jshard.training.callbacks.preemption.Preemption.requested"
    with monkeypatch.context() as patch:
        patch.setattr(asked, lambda self, step: step == BEST)
        with pytest.raises(Preempted):
            make(tmp_path / "run").fit()
    assert best_of(tmp_path / "run/checkpoints") is None
    trainer = make(tmp_path / "run", config={"steps": 2}).fit()
    assert steps_of(tmp_path / "run") == {"1", "2"}
    assert trainer.evaluate(step="best")["eval_loss"] == pytest.approx(loss_at(BEST))


@pytest.mark.slow  # test_buckets.py keeps the best
def test_the_best_of_a_run_in_a_bucket_is_used_there(tmp_path, capsys):
    with running(Folder, tmp_path / "bucket") as server:
        url = f"{server.url}/run"
        trainer = make(url, config={"checkpoint.load_best": True}).fit()
        assert where(trainer) == reached(BEST)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"best: step {BEST}, eval_loss {loss_at(BEST):.4g}"
        config = {"steps": 1, "checkpoint.restore": f"{url}@best"}
        config |= {"checkpoint.every": 0, "checkpoint.best": "", "eval_every": 0}
        started = make(tmp_path / "run", config=config).fit()
        _, got = where(started)
        assert got == pytest.approx(0.8 * at(BEST) + 0.2 * TRAINED, rel=1e-5)
        rows = make(url).predict({"inputs": np.zeros(4, np.float32)}, step="best")
        np.testing.assert_allclose(rows, np.full(4, at(BEST)), rtol=1e-5)


def test_a_run_is_not_continued_from_a_step_but_a_folder_of_that_name_is(run, tmp_path):
    with pytest.raises(UserError, match="mine@best names a step of a run, which goes"):
        make(f"{run}@best")
    folder = shutil.copytree(run, tmp_path / "mine@1")
    assert where(make(folder)) == reached(LAST)
    rows = make(folder).predict({"inputs": np.zeros(4, np.float32)}, step="best")
    np.testing.assert_allclose(rows, np.full(4, at(BEST)), rtol=1e-5)
    assert make(tmp_path / "other@best").workdir == tmp_path / "other@best"
