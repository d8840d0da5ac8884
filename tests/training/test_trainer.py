"""jshard.Trainer: fit, evaluate, test and predict in Python, with hooks."""

import inspect
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jobs import environment
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.system.errors import Interrupted, Preempted
from jshard.training.run.metrics import RunFolder
from resumable import RECIPE, read_metrics

pytestmark = pytest.mark.usefixtures("compiled_once")

ROWS = np.random.default_rng(0).normal(size=(45, 8)).astype(np.float32)
CONFIG = {"steps": 8, "batch_size": 16, "log_every": 2, "checkpoint.every": 0}


def make_model(config, rngs):
    return nnx.Sequential(
        jshard.Unit(nnx.Linear(8, 64, rngs=rngs)),
        nnx.relu,
        nnx.Linear(64, 1, rngs=rngs),
    )


def loss_fn(model, batch):
    error = model(batch["inputs"])[:, 0] - batch["inputs"].sum(1)
    return jshard.Mean(jnp.sum(error**2), error.size)


def make(folder: Path, **given: Any) -> jshard.Trainer:
    """A trainer of parts, in a folder."""
    parts: dict[str, Any] = {
        "make_model": make_model,
        "make_optimizer": lambda config: optax.sgd(0.05),
        "loss_fn": loss_fn,
        "train_data": {"inputs": ROWS},
        "validation_data": {"inputs": ROWS[:20]},
    }
    config = CONFIG | given.pop("config", {})
    return jshard.Trainer(config=config, workdir=folder / "run", **(parts | given))


def of_file(folder: Path, name: str = "run", **given: Any) -> jshard.Trainer:
    """A trainer of tests/helpers/resumable.py's recipe."""
    (folder / "tiny.py").write_text(RECIPE)
    given = {"config": {"steps": 12, "eval_every": 4}} | given
    return jshard.Trainer(folder / "tiny.py", workdir=folder / name, **given)


# fit, evaluate, test.


def test_fit_shows_no_argument_of_the_command_line():
    assert list(inspect.signature(jshard.Trainer.fit).parameters) == ["self"]


def test_parts_train_evaluate_and_test(tmp_path):
    trainer = make(tmp_path, test_data={"inputs": ROWS[20:]}, config={"eval_every": 4})
    before = trainer.evaluate()
    trainer.fit()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert trainer.test()["test_loss"] > 0
    assert trainer.evaluate({"inputs": ROWS[:20]}) == after
    assert int(trainer.state.step) == 8
    assert isinstance(trainer.model, nnx.Module)
    lines = [line for line in trainer.metrics if "loss" in line]
    assert lines[-1]["examples_seen"] == 8 * 16
    assert all(line["time"] > 1.7e9 for line in trainer.metrics)
    assert trainer.metrics[-1]["eval_loss"] == after["eval_loss"]


@pytest.mark.slow
def test_a_file_a_module_and_its_functions_are_the_same_run(tmp_path):
    of_file(tmp_path).fit()
    module = types.ModuleType("mine")
    exec(compile(RECIPE, "mine.py", "exec"), module.__dict__)
    config = {"steps": 12, "eval_every": 4}
    jshard.Trainer(module, config=config, workdir=tmp_path / "module").fit()
    assert read_metrics(tmp_path / "module") == read_metrics(tmp_path / "run")
    names = ("make_model", "make_optimizer", "loss_fn", "make_data", "learning_rate")
    parts = {name: getattr(module, name) for name in names}
    whole = module.get_config()
    whole.update(config)
    jshard.Trainer(config=whole, workdir=tmp_path / "parts", **parts).fit()
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "run")


@pytest.mark.slow
def test_mesh_and_policy_are_used_and_written_down(tmp_path):
    mesh = jshard.make_mesh(replica=2, devices=jax.devices()[:4])
    policy = jshard.Policy(remat="dots", precision=jshard.Precision(compute="bfloat16"))
    trainer = make(tmp_path, mesh=mesh, policy=policy).fit()
    assert trainer.fsdp.mesh == mesh
    assert trainer.fsdp.policy == policy
    text = (tmp_path / "run" / "config.json").read_text()
    for part in ('"remat": "dots"', '"compute": "bfloat16"', '"replica": 2'):
        assert part in text


@pytest.mark.slow
def test_a_trainer_of_the_same_folder_has_its_newest_state(tmp_path, capsys):
    first = of_file(tmp_path).fit()
    again = of_file(tmp_path)
    assert again.evaluate() == first.evaluate()
    again.fit()
    assert "nothing to do" in capsys.readouterr().out
    longer = of_file(tmp_path, config={"steps": 16, "eval_every": 4}).fit()
    assert int(longer.state.step) == 16


KILLED = """
import os, signal, time
import jshard

def on_step(trainer, step, metrics):
    if step == {step}:
        os.kill(os.getpid(), signal.{signal})
        time.sleep(0.3)

trainer = jshard.Trainer(
    "tiny.py", config={{"steps": 12, "eval_every": 4}}, workdir="run", on_step=on_step
)
trainer.fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "name"), [(6, "SIGKILL"), (7, "SIGTERM")])
def test_fit_goes_on_bit_for_bit_after_a_kill(step, name, tmp_path):
    whole = of_file(tmp_path, "whole").fit()
    count = jax.device_count()
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(step=step, signal=name)],
        cwd=tmp_path,
        env=environment() | {"JAX_NUM_CPU_DEVICES": str(count)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (-9 if name == "SIGKILL" else 1)
    if name == "SIGTERM":
        said = "Preempted: SIGTERM at step 7: saved; fit() again continues"
        assert said in done.stderr
    trainer = of_file(tmp_path).fit()
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    same = jax.tree.map(np.array_equal, *map(values, (trainer, whole)))
    assert all(jax.tree.leaves(same))


def values(trainer: jshard.Trainer):
    return trainer.fsdp.fetch((trainer.state.params, trainer.state.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 100])
def test_an_interrupt_keeps_the_state_and_fit_goes_on(every, tmp_path):
    def interrupt(trainer, step, metrics):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # until the thread that answers signals has read it

    config = {"steps": 12, "eval_every": 4, "checkpoint.every": every}
    whole = of_file(tmp_path, "whole", config=config).fit()
    trainer = of_file(tmp_path, config=config, on_step=interrupt)
    kind = Preempted if every else Interrupted
    # A shell's background job is deaf to it, as tests may be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(kind, match=r"interrupted by SIGINT at step 5.*again continues"):
        trainer.fit()
    assert int(trainer.state.step) == 5
    trainer.fit()
    same = jax.tree.map(np.array_equal, *map(values, (trainer, whole)))
    assert all(jax.tree.leaves(same))
    got, want = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "whole")
    assert got[-1] == want[-1]


# predict.


@pytest.mark.quick("columns")
@pytest.mark.parametrize("kind", ["columns", "rows", "stream", "array"])
def test_predictions_have_the_same_rows_in_order_on_any_mesh(kind, tmp_path):
    data = {
        "columns": {"inputs": ROWS},
        "rows": [{"inputs": row} for row in ROWS],
        "stream": lambda: ({"inputs": row} for row in ROWS),
        "array": ROWS,
    }[kind]
    want = None
    for count in (3, 8) if kind == "columns" else (8,):
        mesh = jshard.make_mesh(devices=jax.devices()[:count])
        trainer = make(tmp_path, mesh=mesh)
        got = trainer.predict(data)
        assert got.shape == (45, 1)
        want = np.asarray(trainer.model(ROWS)) if want is None else want
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_predictions_come_in_batches_and_by_the_users_function(tmp_path):
    def fn(model, batch):
        return {"mean": model(batch["x"])[:, 0], "x": batch["x"]}

    trainer = make(tmp_path, predict_fn=fn)
    batches = list(trainer.predict_batches({"x": ROWS}))
    assert [len(batch["x"]) for batch in batches] == [16, 16, 13]
    np.testing.assert_array_equal(trainer.predict({"x": ROWS})["x"], ROWS)
    again = trainer.predict({"x": ROWS}, lambda model, batch: batch["x"][:, :2])
    np.testing.assert_array_equal(again, ROWS[:, :2])


# Hooks.


def test_early_stopping_ends_the_run_as_done_and_saved(tmp_path, capsys):
    # Every evaluation is better than the one before, but by less than counts.
    hook = jshard.training.early_stopping("eval_loss", patience=2, min_delta=1e9)
    config = {"steps": 50, "eval_every": 2, "checkpoint.every": 100}
    trainer = make(tmp_path, on_evaluation=hook, config=config).fit()
    assert int(trainer.state.step) == 6
    out = capsys.readouterr().out
    assert "stopped at step 6: eval_loss has not improved for 2 evaluations" in out
    assert "done in" in out
    assert (tmp_path / "run/checkpoints/6").exists()
    assert "stopped at step 6" in (tmp_path / "run/report.html").read_text()
    trainer.fit()
    assert "nothing to do" in capsys.readouterr().out
    longer = make(tmp_path, on_evaluation=hook, config=config | {"steps": 60})
    assert int(longer.fit().state.step) == 8  # where it asks again
    longer.config.steps = 61  # a key may be set in between
    assert int(longer.fit().state.step) == 10


@pytest.mark.slow  # test_step_log.py has what hooks return
def test_what_hooks_return_is_logged_and_shown(tmp_path, monkeypatch):
    """After each evaluation and checkpoint, of which the last step has both."""
    calls, order = [], []
    for kind, name in ((RunFolder, "flush"), (Checkpointer, "save")):
        method = getattr(kind, name)

        def noted(*args, _method=method, _name=name, **options):
            order.append(_name)
            return _method(*args, **options)

        monkeypatch.setattr(kind, name, noted)

    def on_evaluation(trainer, step, metrics):
        calls.append((step, trainer.predict({"inputs": ROWS}).shape))
        picture = np.linspace(0, 1, 48).reshape(4, 4, 3)
        return {"own": jnp.float32(step), "drawn": picture, "said": f"<{step}>"}

    saves = []
    trainer = make(
        tmp_path,
        on_evaluation=on_evaluation,
        on_step=[lambda trainer, step, metrics: {"twice": 2 * metrics["loss"]}],
        on_checkpoint=lambda trainer, step, metrics: saves.append((step, metrics)),
        config={"steps": 9, "eval_every": 4, "checkpoint.every": 4},
    ).fit()
    assert calls == [(4, (45, 1)), (8, (45, 1)), (9, (45, 1))]
    assert [step for step, _ in saves] == [4, 8, 9]
    assert order == ["flush", "save"] * 3  # a resumed run repeats no step before it
    losses = {x["step"]: x["eval_loss"] for x in trainer.metrics if "eval_loss" in x}
    kept = metadata.read(tmp_path / "run/checkpoints/9")["metrics"]
    assert kept["eval_loss"] == losses[9]  # for `checkpoint.best`
    assert saves[0][1]["checkpoint_bytes"] > 0
    assert [x["own"] for x in trainer.metrics if "own" in x] == [4, 8, 9]
    assert len([x for x in trainer.metrics if "twice" in x]) == 9
    page = (tmp_path / "run/report.html").read_text()
    assert "data:image/png;base64," in page
    assert "&lt;9&gt;" in page
    assert (tmp_path / "run/samples/drawn-9.png").read_bytes().startswith(b"\x89PNG")
    assert trainer.report().path == tmp_path / "run/report.html"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on_step", "on_evaluation", "on_checkpoint"])
def test_an_error_in_a_hook_comes_after_a_save(kind, tmp_path):
    def fail(trainer, step, metrics):
        if step >= 3:
            raise RuntimeError("mine")

    config = {"eval_every": 3, "checkpoint.every": 4}
    trainer = make(tmp_path, config=config, **{kind: fail})
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit()
    step = int(trainer.state.step)
    assert step >= 3
    assert (tmp_path / f"run/checkpoints/{step}").exists()
    assert int(make(tmp_path, config=config).fit().state.step) == 8
