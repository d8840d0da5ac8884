"""When a job must end, as process 0 judges it, and how it says so."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jshard.system.compat.coordination import KeyValueStore
from jshard.system.jobs import stuck
from jshard.system.jobs.heartbeat import (
    Beat,
    Heartbeat,
    Record,
    format_places,
    format_processes,
    judge,
)
from jshard.system.jobs.stuck import Patience

SILENCE, STUCK = 8.0, 100.0


def seen(
    heard: float,
    moved: float = 0.0,
    *,
    finished: bool = False,
    at: str = "step 3 (step)",
    moves: int = 1,
    patience: float = STUCK,
) -> Record:
    return Record(heard, moved, Beat(1, moves, at, patience, finished))


def test_a_job_whose_processes_beat_and_move_goes_on():
    assert judge({0: seen(10, 9), 1: seen(3, 2)}, 10, SILENCE) is None


def test_silent_processes_are_named_with_the_places_of_all():
    why = judge(
        {0: seen(20), 1: seen(11.9, at="step 2 (data)"), 2: Record(0, 0)},
        20,
        SILENCE,
    )
    assert why is not None
    assert why.startswith("error: processes 1-2 gave no sign of life for 8 s")
    assert "process 1 at step 2 (data)" in why
    assert "process 2 at its start" in why
    assert "process 0 at step 3 (step)" in why


def test_who_has_left_may_be_silent():
    assert judge({0: seen(20), 1: seen(0, finished=True)}, 20, SILENCE) is None


def test_a_job_is_stuck_only_where_none_of_its_processes_gets_on():
    now = 201.0
    stuck = {0: seen(now, 100), 1: seen(now, 99, at="step 3 (data)")}
    why = judge(stuck, now, SILENCE)
    assert why is not None
    assert why.startswith("error: no process made progress for 101 s (watch.stuck)")
    assert "process 1 at step 3 (data)" in why
    assert judge({**stuck, 2: seen(now, 102)}, now, SILENCE) is None
    assert judge({**stuck, 2: Record(now, now)}, now, SILENCE) is None


def test_who_may_stay_longer_where_it_is_is_waited_for():
    now = 201.0
    waiting, saving = seen(now, 100), seen(now, 99, patience=600.0)
    assert judge({0: waiting, 1: saving}, now, SILENCE) is None


def test_the_process_that_the_others_wait_for_is_named_first():
    now = 201.0
    late = seen(now, 90, at="step 3 (data)", moves=7)
    why = judge({0: seen(now, 95, moves=9), 1: late}, now, SILENCE)
    assert why is not None
    assert why.startswith(
        "error: the others wait for process 1: no process made progress"
    )


@pytest.fixture
def clock(monkeypatch):
    """What time it is for `Patience`: `clock.now`."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(stuck, "time", clock)
    return clock


def stay(watched: Patience, clock, phase: str, seconds: float) -> float:
    """Stays at a phase; returns the limit that there was for it."""
    limit = watched.at(phase)
    clock.now += seconds
    return limit


def test_a_step_may_take_a_minute_or_ten_steps_whichever_is_longer(clock):
    for step, data, limit in [(1.0, 0.1, stuck.LEAST), (30.0, 2.0, 320.0)]:
        watched = Patience()
        stay(watched, clock, "compiling", 40.0)
        for _ in range(stuck.STAYS):
            stay(watched, clock, "computing", step - 1.0)
            stay(watched, clock, "data", data)
            stay(watched, clock, "step", 1.0)
        for phase in stuck.STEP:
            assert watched.at(phase) == pytest.approx(limit, rel=0.1)
    assert stuck.LEAST < 60.0, "told within a minute"


def test_a_slow_first_compilation_evaluation_or_save_is_not_taken_for_stuck(clock):
    watched = Patience()
    first = "setting up", "compiling", "computing", "evaluating", "saving", "sampling"
    for phase in first:
        assert stay(watched, clock, phase, 300.0) == stuck.UNKNOWN
    assert watched.at("data") == stuck.UNKNOWN, "the second step may compile, too"


def test_the_second_step_may_take_ten_times_the_first_with_its_compilation(clock):
    watched = Patience()
    stay(watched, clock, "compiling", 9.0)
    stay(watched, clock, "computing", 1.0)
    assert watched.at("data") == pytest.approx(100.0)


def test_each_phase_has_the_limit_of_its_own_stays_and_forgets_old_ones(clock):
    watched = Patience()
    stay(watched, clock, "compiling", 1.0)
    for _ in range(3):
        stay(watched, clock, "computing", 0.0)
        stay(watched, clock, "step", 1.0)
        stay(watched, clock, "evaluating", 20.0)
        stay(watched, clock, "saving", 90.0)
    assert stay(watched, clock, "step", 1.0) == stuck.LEAST
    assert stay(watched, clock, "evaluating", 20.0) == pytest.approx(200.0)
    assert stay(watched, clock, "saving", 0.1) == pytest.approx(900.0)
    for _ in range(stuck.STAYS):
        stay(watched, clock, "evaluating", 0.1)
        stay(watched, clock, "saving", 0.1)
    assert watched.at("evaluating") == stuck.LEAST
    assert watched.at("saving") == stuck.LEAST_SAVING


def test_a_number_of_seconds_holds_for_every_phase_and_0_is_never(clock):
    watched, never = Patience(6.0), Patience(0.0)
    for phase in ("compiling", "step", "data", "saving"):
        assert stay(watched, clock, phase, 20.0) == 6.0
        assert judge({0: seen(10.0, patience=never.at(phase))}, 10.0, SILENCE) is None


def test_a_beat_counts_once_and_a_move_counts_as_one():
    record = Record(0, 0)
    record.update(Beat(1, 5, "a"), 1)
    record.update(Beat(1, 5, "a"), 2)
    assert (record.heard, record.moved) == (1, 1)
    record.update(Beat(2, 5, "a"), 3)
    assert (record.heard, record.moved) == (3, 1)
    record.update(Beat(3, 6, "b"), 4)
    assert (record.heard, record.moved) == (4, 4)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "process 3"),
        ([0, 1, 2], "processes 0-2"),
        ([7, 0, 1], "processes 0-1 and 7"),
        ([0, 2, 3, 9], "processes 0, 2-3 and 9"),
    ],
)
def test_processes_are_named_in_runs(numbers, text):
    assert format_processes(numbers) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_names_of_processes_are_exact(numbers):
    text = format_processes(numbers).split(" ", 1)[1]
    found = set()
    for part in text.replace(" and ", ", ").split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_places_begin_with_who_is_somewhere_else():
    at = {i: seen(0, at="step 5 (step)") for i in range(4)}
    at[2] = seen(0, at="step 4 (data)")
    assert format_places(at) == (
        "process 2 at step 4 (data), processes 0-1 and 3 at step 5 (step)"
    )


class SlowStore(KeyValueStore):
    """Stands in for the store, each of whose answers takes its time."""

    def __init__(self):
        self._texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        time.sleep(0.3)
        self._texts[key] = text

    def all_in(self, folder: str) -> dict[str, str]:
        texts = self._texts.items()
        return {k.split("/")[1]: x for k, x in texts if k.startswith(folder)}


def test_no_thread_is_in_the_store_when_a_job_is_left():
    heartbeat = Heartbeat(SlowStore(), 0, 1, lambda *_: None)
    assert heartbeat.leave()
    assert not [x for x in threading.enumerate() if x.name.startswith("jshard_")]
