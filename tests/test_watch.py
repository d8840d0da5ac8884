"""When a job must end, as process 0 judges it, and how it says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jshard.distributed.watch import Beat, Seen, judge, places, processes

SILENCE, STUCK = 8.0, 100.0


def seen(heard: float, moved: float = 0.0, *, left: bool = False, at: str = "") -> Seen:
    return Seen(Beat(1, 1, at or "step 3 (step)", left), heard, moved)


def test_a_job_whose_processes_beat_and_move_goes_on():
    assert judge({0: seen(10, 9), 1: seen(3, 2)}, 10, SILENCE, STUCK) is None


def test_silent_processes_are_named_with_the_places_of_all():
    why = judge(
        {0: seen(20), 1: seen(11.9, at="step 2 (data)"), 2: Seen(None, 0, 0)},
        20,
        SILENCE,
        STUCK,
    )
    assert why is not None
    assert why.startswith("error: processes 1-2 gave no sign of life for 8 s")
    assert "process 1 at step 2 (data)" in why
    assert "process 2 at its start" in why
    assert "process 0 at step 3 (step)" in why


def test_who_has_left_may_be_silent():
    assert judge({0: seen(20), 1: seen(0, left=True)}, 20, SILENCE, STUCK) is None


def test_a_job_is_stuck_only_where_none_of_its_processes_gets_on():
    now = 201.0
    stuck = {0: seen(now, 100), 1: seen(now, 99, at="step 3 (data)")}
    why = judge(stuck, now, SILENCE, STUCK)
    assert why is not None
    assert "no process got on for 100 s (watch.stuck)" in why
    assert "process 1 at step 3 (data)" in why
    assert judge({**stuck, 2: seen(now, 102)}, now, SILENCE, STUCK) is None
    assert judge(stuck, now, SILENCE, 0) is None, "0 is never"


def test_a_beat_counts_once_and_a_move_counts_as_one():
    s = Seen(None, 0, 0)
    s.update(Beat(1, 5, "a"), 1)
    s.update(Beat(1, 5, "a"), 2)
    assert (s.heard, s.moved) == (1, 1)
    s.update(Beat(2, 5, "a"), 3)
    assert (s.heard, s.moved) == (3, 1)
    s.update(Beat(3, 6, "b"), 4)
    assert (s.heard, s.moved) == (4, 4)


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
    assert processes(numbers) == text


@given(st.sets(st.integers(0, 300), min_size=1))
def test_names_of_processes_are_exact(numbers):
    text = processes(numbers).split(" ", 1)[1]
    found = set()
    for part in text.replace(" and ", ", ").split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_places_begin_with_who_is_somewhere_else():
    at = {i: seen(0, at="step 5 (step)") for i in range(4)}
    at[2] = seen(0, at="step 4 (data)")
    assert places(at) == (
        "process 2 at step 4 (data), processes 0-1 and 3 at step 5 (step)"
    )
