"""A line of metrics for each step, and what writes it while steps go on."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jshard
from jshard.recipe.config.settings import RunSettings
from jshard.recipe.schedule import learning_rate as schedule
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers
from jshard.training import throughput
from jshard.training.callbacks import step_log
from jshard.training.run.background import Background
from test_trainer import ROWS, make

pytestmark = pytest.mark.usefixtures("compiled_once")


def steps(trainer):
    return [line for line in trainer.metrics if "loss" in line]


# Lines.


def test_every_step_has_one_line_with_time_examples_and_what_hooks_returned(tmp_path):
    def own(trainer, step, metrics):
        return {"own": float(step), "twice": 2 * metrics["loss"]}

    rates = {"learning_rate": lambda config: lambda step: 0.05 / (1 + step)}
    lines = steps(make(tmp_path, on_step=own, **rates).fit())
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["examples_seen"] for line in lines] == list(range(16, 144, 16))
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    for line in lines:
        assert line["own"] == line["step"]
        assert line["twice"] == 2 * line["loss"]
        # The first update has the schedule's value at 0.
        assert line["learning_rate"] == pytest.approx(0.05 / line["step"])
        assert ("step_time" in line) == (line["step"] > 1)


def test_an_error_keeps_the_lines_of_all_steps_before_it(tmp_path):
    def rows():
        yield from ({"inputs": ROWS[i % 45]} for i in range(5 * 16))
        raise OSError("the disk is gone")

    trainer = make(tmp_path, train_data=rows)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit()
    assert int(trainer.state.step) == 5
    assert [line["step"] for line in steps(trainer)] == [1, 2, 3, 4, 5]


@pytest.mark.slow  # test_update_counts.py rejects a step
def test_a_run_goes_on_after_a_rejected_step_and_logs_the_rates_that_were_used(
    tmp_path, capsys
):
    schedule = optax.linear_schedule(0.05, 0.0, 8)

    def rows():
        for i in range(8 * 16):
            yield {"inputs": ROWS[i % 45] + (np.nan if i // 16 == 2 else 0)}

    trainer = make(
        tmp_path,
        train_data=rows,
        make_optimizer=lambda config: optax.apply_if_finite(optax.sgd(schedule), 2),
        learning_rate=lambda config: schedule,
    )
    lines = steps(trainer.fit())
    rates = [line["learning_rate"] for line in lines]
    # The third step's, which it did not use, is the fourth's.
    assert rates == pytest.approx([float(schedule(i)) for i in (0, 1, 2, *range(2, 7))])
    assert [line["skipped"] for line in lines] == [step == 3 for step in range(1, 9)]
    assert [line["loss"] is None for line in lines] == [i == 3 for i in range(1, 9)]
    said = "step 3: its gradients are not finite (loss nan); the update was skipped\n"
    assert capsys.readouterr().out.count(said) == 1
    assert trainer.evaluate()["eval_loss"] < 1


@pytest.mark.quick("loss")
@pytest.mark.parametrize("name", ["step", "time", "loss"])
def test_a_hook_cannot_return_what_the_line_has_already(name, tmp_path):
    trainer = make(tmp_path, on_step=lambda trainer, step, metrics: {name: 1.0})
    said = f"on_step: <lambda> returned '{name}', which the run logs itself"
    with pytest.raises(UserError, match=said):
        trainer.fit()
    assert len(steps(trainer)) == 1


# Times.


class Clock:
    """Stands in for the module `time`, and for the devices of a run."""

    def __init__(self, data: float, compute: float, *, inline: bool):
        self.now = self.busy_until = 0.0
        self._data, self._compute, self._inline = data, compute, inline

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def step(self) -> dict[str, "Metric"]:
        """Reads a batch and dispatches a step; inline ones are complete then."""
        self.now += self._data
        self.busy_until = max(self.now, self.busy_until) + self._compute
        metric = Metric(self, self.busy_until)
        if self._inline:
            self.wait(self.busy_until)
        return {"loss": metric, "grad_norm": metric}

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class Metric:
    """An array of a step that is complete at some time."""

    def __init__(self, clock: Clock, complete: float):
        self._clock, self._complete = clock, complete

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return self._clock.now >= self._complete

    def __float__(self) -> float:
        self._clock.wait(self._complete)
        return 1.0


class Written:
    """What a StepLog has of a run's folder and its display."""

    def __init__(self):
        self.times: dict[int, float] = {}

    def write(self, step, values):
        if "step_time" in values:
            self.times[step] = values["step_time"]

    def log(self, step, values):
        self.write(step, values)


@pytest.mark.parametrize(
    ("data", "compute", "inline", "takes"),
    [
        (0.001, 1.0, False, 1.0),
        (0.001, 1.0, True, 1.0),
        (1.0, 0.001, False, 1.0),
        (1.0, 0.9, False, 1.0),
        (0.9, 1.0, False, 1.0),
        (1.0, 1.0, True, 2.0),
    ],
    ids=["devices", "inline", "data", "data-even", "devices-even", "inline-both"],
)
@pytest.mark.parametrize("every", [1, 2, 3, 4, 10])
def test_step_times_are_those_of_training_around_evaluations(
    every, data, compute, inline, takes, monkeypatch
):
    """Whatever a step waits for, and however many are under way."""
    clock, run = Clock(data, compute, inline=inline), Written()
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(step_log, "time", clock)
    speed = throughput.Throughput({"inputs": ROWS[:16]}, jshard.make_mesh())
    settings = RunSettings(steps=40, log_every=1)
    recipe = SimpleNamespace(
        throughput=speed, learning_rate=None, find_cause=lambda step: ""
    )
    job = SimpleNamespace(settings=settings, peers=Peers())
    given: Any = (job, 0, recipe, run, run)
    with step_log.StepLog(*given, started=0.0) as log:
        for step in range(1, 41):
            log.after_step(step, clock.step())
            log.add_returned(step, {})
            if step == 1 or step % every == 0:
                with log.drained() as newest:
                    assert newest["loss"] == 1.0
                    clock.now += 100.0  # evaluates
    assert sorted(run.times) == list(range(2, 41))
    # The first step waits for its data and for the devices, whose end is noticed when
    # the third is dispatched.
    for step, seconds in run.times.items():
        first = step == 2 or (step - 1) % every == 0
        longest = data + compute + takes if first else 1.5 * takes
        assert 0.6 * takes < seconds <= 1.001 * longest, (step, seconds)


# Schedules.


def test_a_schedule_is_computed_for_many_steps_at_once_and_is_the_same():
    asked = []

    def cosine(step):
        asked.append(step)
        return optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 3000)(step)

    rate = schedule.by_step(cosine)
    for step in (0, 5, 1023, 1024, 2999, 7):
        assert rate(step) == pytest.approx(float(cosine(step)), rel=1e-5)
    assert len(asked) <= 3 + 6  # traced, and here


@pytest.mark.parametrize(
    "function",
    [
        lambda step: 0.1,
        lambda step: 0.1 if step < 10 else 0.01,
        lambda step: np.interp(step, [0, 20], [1.0, 0.0]),
        lambda step: [jnp.float32(1.0), jnp.float32(0.5)][step // 10],
    ],
)
def test_a_schedule_may_be_any_python(function):
    rate = schedule.by_step(function)
    assert [rate(step) for step in (0, 15)] == [float(function(s)) for s in (0, 15)]


# Background work.


def test_background_work_is_done_in_order_and_in_batches():
    batches = []
    background = Background(batches.append, 0.05, "test")
    for item in range(100):
        background.put(item)
    assert background.drain(10)
    assert [item for batch in batches for item in batch] == list(range(100))
    assert len(batches) < 100
    background.put(100)
    background.close()
    assert batches[-1] == [100]
    deadline = time.monotonic() + 5
    while any(thread.name == "test" for thread in threading.enumerate()):
        assert time.monotonic() < deadline


def test_background_work_that_fails_or_hangs_does_not_hold_up_who_waits():
    def fail(items):
        raise OSError("gone")

    background = Background(fail, 0.0, "test")
    background.put(1)
    assert background.drain(10)
    assert str(background.error) == "gone"
    background.close()
    answer = threading.Event()
    background = Background(lambda items: answer.wait(10), 0.0, "test")
    background.put(1)
    assert not background.drain(0.05)
    assert not background.close(0.05)
    answer.set()
    assert background.close()
    assert background.close()


def test_background_work_ends_however_soon_it_is_closed():
    """What is handed over while the thread looks for more is worked on, too."""
    for rest in (0.0, 0.0, 1e-4) * 100:
        done: list[int] = []
        background = Background(done.extend, rest, "test")
        background.put(1)
        background.end(lambda done=done: done.append(2))
        assert background.close(10)
        assert done == [1, 2]
