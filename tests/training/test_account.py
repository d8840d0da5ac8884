"""The account of an attempt: every second has one category, and survives a kill."""

import gc
import json
import queue
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jshard.system.errors import UserError
from jshard.system.pages import page
from jshard.training.report.goodput import CATEGORIES, read_goodput
from jshard.training.run import account as module
from jshard.training.run.account import _CATEGORIES, Account
from test_trainer import make


class Clock:
    """Stands in for the module `time`, from an hour after the process started."""

    def __init__(self) -> None:
        self.now = 3600.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def spend(
    clock: Clock, account: Account, phase: str, step: int, seconds: float
) -> None:
    account.at(phase, step)
    clock.now += seconds


def seconds_of(account: Account) -> dict[str, float]:
    return {k: v for k, v in account._line()["seconds"].items() if v}


def complete(account: Account, step: int, at: float) -> None:
    account._steps._at = at
    account._steps.completed = step


def test_every_second_has_one_category_and_training_hides_what_is_beside_it(clock):
    account = Account(clock.now - 7.0)  # it took 7 s until then
    spend(clock, account, "setting up", 0, 3.0)
    account.apart("compiling", 1.0)  # of an initial value
    spend(clock, account, "compiling", 1, 20.0)
    spend(clock, account, "computing", 1, 0.0)
    account._steps._dispatched = 1
    clock.now += 2.0
    account.at("hooks", 1)
    complete(account, 1, clock.now)
    spend(clock, account, "data", 1, 4.0)  # nothing is under way
    spend(clock, account, "step", 2, 0.5)
    account.at("computing", 2)
    account._steps._dispatched = 2
    # The step takes 5 s. The hook is done by then; the data come 3 s later.
    done = clock.now + 5.0
    spend(clock, account, "hooks", 2, 1.0)
    account.apart("collecting", 0.5)  # which holds up nothing
    spend(clock, account, "data", 2, 7.0)
    complete(account, 2, done)
    spend(clock, account, "step", 3, 0.0)
    spend(clock, account, "saving", 3, 6.0)
    account.apart("collecting", 2.0)
    spend(clock, account, "a new phase", 3, 0.25)
    assert seconds_of(account) == {
        "starting": 7.0 + 2.0,
        "compiling": 1.0 + 20.0,
        "training": 2.0 + 0.5 + 5.0,
        "data": 4.0 + 3.0,
        "saving": 4.0,
        "collecting": 2.0,
        "other": 0.25,
    }
    assert sum(seconds_of(account).values()) == clock.now - (3600 - 7)


def test_every_category_of_a_phase_has_words_and_a_color():
    assert {*_CATEGORIES.values()} <= {*CATEGORIES}
    colors = (Path(page.__file__).parent / "page.css").read_text()
    assert all(f".time-{name} {{" in colors for name in CATEGORIES)


def test_the_seconds_of_a_real_run_sum_to_its_wall_time(tmp_path, capsys):
    def slow_hook(trainer, step, metrics):
        time.sleep(0.02)
        float(metrics["loss"])
        if step == 3:
            objects = [[] for _ in range(200_000)]
            gc.collect()
            del objects

    config = {"eval_every": 4, "checkpoint.every": 4}
    trainer = make(tmp_path, config=config, on_step=slow_hook)
    began, callbacks = time.time(), [*gc.callbacks]
    trainer.fit()
    wall = time.time() - began
    assert gc.callbacks == callbacks
    found = read_goodput(trainer.workdir)
    assert found is not None
    assert found.total == pytest.approx(wall, rel=0.02, abs=0.05)
    assert found.seconds["hooks"] > 0.1
    parts = {"training", "compiling", "starting", "evaluating", "saving"}
    assert parts <= found.seconds.keys()
    assert str(found) in capsys.readouterr().out
    lines = Path(trainer.workdir / "attempts.jsonl").read_text().splitlines()
    assert [x["step"] for x in map(json.loads, lines) if x.get("saved")] == [4, 8]
    assert found.seconds["collecting"] > 0
    collected = {
        x["step"]: x["collect_time"] for x in trainer.metrics if "collect_time" in x
    }
    assert collected[4] > 1e-3  # the hook runs after step 3's line is made
    assert json.loads(lines[-1])["step"] == 8
    # As if it had been killed soon after the save of step 4, and before that of 8.
    killed = next(i for i, x in enumerate(lines) if json.loads(x).get("saved"))
    text = "".join(f"{x}\n" for x in lines[: killed + 1])
    (trainer.workdir / "attempts.jsonl").write_text(text)
    shutil.rmtree(trainer.workdir / "checkpoints" / "8")
    again = make(tmp_path, config=config).fit()
    found = read_goodput(again.workdir)
    assert found is not None
    assert (found.attempts, found.lost_steps) == (2, 4)  # by their metrics


def test_a_kill_leaves_the_lines_so_far_and_the_next_attempt_goes_on(tmp_path, clock):
    killed = Account(clock.now - 5.0)
    with killed.recorded(tmp_path, 0):
        spend(clock, killed, "saving", 3, 1.0)
        killed.at("data", 3)
        deadline = time.monotonic() + 10
        while b"saved" not in (tmp_path / "attempts.jsonl").read_bytes():
            assert time.monotonic() < deadline
        text = (tmp_path / "attempts.jsonl").read_bytes()
    assert text.endswith(b"}\n")  # whole lines, at once
    (tmp_path / "attempts.jsonl").write_bytes(text + b'{"attempt": 1, "fr')
    clock.now += 100.0
    following = Account(clock.now - 2.0)
    with following.recorded(tmp_path, 3):
        pass
    found = read_goodput(tmp_path)
    assert found is not None
    assert (found.attempts, found.lost_steps, found.down) == (2, 0, 98.0)
    assert found.seconds == {"starting": 5.0 + 2.0, "saving": 1.0}


def test_an_account_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "attempts.jsonl").mkdir()
    wrong = pytest.raises(UserError, match=r"cannot write .*attempts\.jsonl: Is a dir")
    with wrong, Account(time.time()).recorded(tmp_path, 0):
        pass


def test_other_processes_keep_no_account(tmp_path):
    account = Account(time.time(), enabled=False)
    with account, account.recorded(tmp_path, 0):
        account.at("saving", 1)
        account.at("data", 1)
        account.dispatched(1, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_notes_when_the_devices_complete_a_step(fails):
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def block():
        ended.get()
        if fails:
            raise RuntimeError("the device is gone")

    account = Account(time.time())
    with account:
        account.dispatched(7, [SimpleNamespace(block_until_ready=block)])
        assert account._steps.busy(1.0, 3.0) == 2.0
        ended.put(None)
        deadline = time.monotonic() + 10
        while account._steps.completed < 7:
            assert time.monotonic() < deadline
    assert account._steps.busy(time.perf_counter(), time.perf_counter() + 1) == 0.0


@pytest.mark.parametrize(("seconds", "ends"), [(0.3, True), (2.0, False)])
def test_no_thread_is_in_jax_when_an_account_ends_unless_a_step_does_not_end(
    seconds, ends, monkeypatch
):
    monkeypatch.setattr(module, "_LATEST_STEP", 1.0)
    step = SimpleNamespace(block_until_ready=lambda: time.sleep(seconds))
    began = time.monotonic()
    with Account(time.time()) as account:
        account.dispatched(7, [step])
    assert time.monotonic() - began < 1.9
    names = [x.name for x in threading.enumerate()]
    assert ("jshard-steps" not in names) is ends
