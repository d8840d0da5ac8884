"""Streams go on where they were: bit for bit, on any number of processes."""

import copy
import importlib.util
import itertools
import threading
import time
from typing import Any

import grain
import numpy as np
import pytest

from jshard.data.batches import TrainingBatches, batches
from jshard.data.dataset import first_example
from jshard.data.stream_reader import StreamState, describe
from jshard.data.stream_state import FILE, read_state, state_files
from jshard.data.text.streamed_text import streamed_text
from jshard.system.errors import UserError
from streams import (
    ROWS,
    SOURCES,
    STEPS,
    Counted,
    CountedIterator,
    Loader,
    divided,
    open_stream,
)

opened: list[TrainingBatches] = []


def training(source: Any, **options: Any) -> TrainingBatches:
    options = {"batch_size": 8, "start_step": 0, "num_steps": STEPS} | options
    read = TrainingBatches(open_stream(source), options.pop("state", None), **options)
    opened.append(read)
    return read


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Closing ends all threads, in the midst of reading or after an error."""
    yield
    for read in opened:
        read.close()
    opened.clear()
    assert not threads()


def threads() -> list[str]:
    return [x.name for x in threading.enumerate() if "thread-prefetch" in x.name]


def stored(state: StreamState | None, folder: Any) -> StreamState | None:
    """What a checkpoint gives back."""
    for name, text in state_files(state).items():
        (folder / name).write_text(text)
    return read_state(folder)


def together(parts: list[Any]) -> Any:
    return {k: np.concatenate([rows[k] for rows in parts]) for k in parts[0]}


@pytest.mark.quick("i", "l", "f", "d", "w", "grain's loader")
@pytest.mark.parametrize("name", SOURCES)
def test_a_run_goes_on_where_it_was(name, tmp_path):
    whole = list(training(SOURCES[name]()))
    assert len(whole) == STEPS
    # 23 examples are an epoch, of just under 3 steps.
    for step in (2, 5) if "grain" in name else (1, 2, 3, 5, 11):
        state = stored(whole[step - 1].state, tmp_path)
        assert (state is None) == ("without a state" in name)
        rest = list(training(SOURCES[name](), state=state, start_step=step))
        np.testing.assert_equal(
            [batch.rows for batch in rest], [batch.rows for batch in whole[step:]]
        )
    assert all(batch.waited >= 0 for batch in whole)


@pytest.mark.quick("i", "l", "f", "d", "w", "grain, packed and mixed", "grain's loader")
@pytest.mark.parametrize("name", SOURCES)
def test_a_run_goes_on_with_another_batch_size_at_the_next_example(name, tmp_path):
    whole = list(training(SOURCES[name](), num_steps=4))
    state = stored(whole[1].state, tmp_path)
    given = {"state": state, "start_step": 2, "first_example": 16, "num_steps": 6}
    rest = list(training(SOURCES[name](), batch_size=4, **given))
    np.testing.assert_equal(
        [together([x.rows for x in rest[i : i + 2]]) for i in (0, 2)],
        [batch.rows for batch in whole[2:]],
    )


def test_what_a_stream_without_a_state_gave_must_divide_over_the_processes():
    given = {"process_count": 2, "start_step": 1, "first_example": 3}
    with pytest.raises(UserError, match=r"read 3 examples of .* 2 processes cannot"):
        training(SOURCES["divided, without a state"](), **given)


@pytest.mark.parametrize("name", ["divided", "divided, without a state", "iterable"])
@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_the_number_of_processes_may_change(name, before, after, tmp_path):
    def run(count, **options):
        read = [
            training(SOURCES[name](), process_index=i, process_count=count, **options)
            for i in range(count)
        ]
        return list(zip(*read, strict=True))

    whole = run(before)
    states = [one.state for one in whole[4]]
    if states[0] is None:
        if before == after or name != "divided, without a state":
            state = None
        else:
            return  # it is divided anew: nothing knows how it was
    else:
        of_part = {q: x for one in states for q, x in one.of_part.items()}
        parts = before if "divided" in name else 1
        assert sorted(of_part) == list(range(parts))
        state = stored(StreamState(states[0].kind, parts, of_part), tmp_path)
    rest = run(after, state=state, start_step=5)
    for one, other in zip(rest, whole[5:], strict=True):
        np.testing.assert_equal(
            together([x.rows for x in one]), together([x.rows for x in other])
        )
    assert len(rest) == STEPS - 5


@pytest.mark.core
def test_nothing_is_read_again_or_by_another_process():
    made = {}

    def rows(part, parts):
        made[part] = Counted(ROWS[part::parts])
        return made[part]

    read = training(rows, process_index=1, process_count=2, num_steps=2)
    second = list(read)[1]
    assert {part: one.read for part, one in made.items()} == {1: 8}
    again = training(
        rows,
        process_index=1,
        process_count=2,
        num_steps=3,
        start_step=2,
        state=second.state,
    )
    assert next(again).rows["x"].tolist() == [row["x"] for row in ROWS[1::2][8:]] + [1]
    assert made[1].read == 1  # of the second epoch: the source is opened for each


def test_the_state_is_that_of_the_batch_though_more_was_read():
    source = Counted()
    read = training(source, batch_size=2, num_steps=10)
    deadline = time.monotonic() + 10
    while source.read < 20 and time.monotonic() < deadline:  # the first and 8 ahead
        time.sleep(0.01)
    assert source.read >= 18
    state = next(read).state
    assert state is not None
    assert state.of_part[0]["before"] == {"epoch": 0, "source": {"at": 2}}
    read.close()


def test_waiting_is_counted_and_the_thread_ends():
    def slowly():
        for row in itertools.cycle(ROWS):
            time.sleep(0.02)
            yield row

    read = training(slowly, batch_size=4, num_steps=1000)
    waits = [next(read).waited for _ in range(4)]
    assert sum(waits) > 4 * 4 * 0.02 * 0.8
    assert threads()
    read.close()
    assert not threads()


def test_an_error_in_the_thread_is_the_users_and_ends_it():
    def rows():
        yield from ROWS[:8]
        raise KeyError("column")

    read = training(rows)
    with pytest.raises(KeyError, match="column"):
        list(read)
    assert not threads()

    def ragged():
        yield from ROWS[:8]
        yield {"x": "a", "y": 1}

    with pytest.raises(UserError, match=r"example\['x'\] is text"):
        list(training(ragged))


def test_a_stream_that_ends_before_the_run_is_one_line():
    once = training(iter(ROWS))
    with pytest.raises(UserError, match="the training data ends in step 3 of 12"):
        list(once)


def test_a_first_example_is_still_read():
    for name in SOURCES:
        source = SOURCES[name]()
        stream = open_stream(source)
        looked_at = first_example(stream)
        (batch, *_) = batches(stream, batch_size=1, start_step=0, num_steps=1)
        np.testing.assert_equal({k: v[0] for k, v in batch.items()}, looked_at)


class Shorter(Counted):
    """Its state has another form."""

    def __iter__(self):
        return ShorterIterator(self)


class ShorterIterator(CountedIterator):
    def get_state(self):
        return {"place": self.at, "more": 1}

    def set_state(self, state):
        self.at = state.get("place", 0)


def mixed(*weights: float) -> grain.IterDataset:
    rows = grain.MapDataset.source(ROWS).repeat().to_iter_dataset()
    return grain.IterDataset.mix([rows] * len(weights), weights)


@pytest.mark.parametrize(
    ("of", "given", "said"),
    [
        (Loader, Counted, "a Counted, but the checkpoint has the state of a Loader:"),
        (
            lambda: lambda: Counted(),
            lambda: lambda: Loader(),
            "which they refuse (KeyError: 'rng')",
        ),
        (
            lambda: lambda: Counted(),
            lambda: lambda: iter(ROWS),
            "with a state, which these lack",
        ),
        (
            lambda: lambda: Counted(),
            lambda: lambda: Shorter(),
            "of another form (its keys: ['at', 'more', 'place'])",
        ),
        (
            lambda: lambda: mixed(1, 1, 1),
            lambda: lambda: mixed(1, 1),
            "of another form (['parents']: 3, not 2)",
        ),
        (
            lambda: mixed(1, 1, 1),
            lambda: mixed(1, 1),
            "the number of rows: 23, 23, but 23, 23, 23 at the checkpoint: resume",
        ),
    ],
)  # fmt: skip
def test_a_state_of_another_source_is_one_line(of, given, said, tmp_path):
    state = stored(next(training(of())).state, tmp_path)
    with pytest.raises(UserError) as caught:
        training(given(), state=state, start_step=1)
    assert said in str(caught.value)
    assert "resume with the data of the run" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_stored_or_divided_is_one_line(tmp_path):
    sharded = grain.DataLoader(
        data_source=ROWS,
        sampler=grain.samplers.IndexSampler(
            len(ROWS), grain.sharding.ShardOptions(0, 2), num_epochs=1
        ),
    )
    with pytest.raises(UserError, match="the DataLoader of Grain gives each process"):
        open_stream(sharded)
    state = StreamState("a thing", 1, {0: {"lock": threading.Lock()}})
    with pytest.raises(UserError, match="the state of a thing has a lock, which"):
        state_files(state)
    with pytest.raises(UserError, match=r"lambda>\(a\) must take no arguments, or two"):
        open_stream(lambda a: a)
    state = next(training(divided, process_count=2)).state
    assert state is not None
    with pytest.raises(UserError, match="batch_size=7: the run's data are in 2 parts"):
        training(divided, state=state, batch_size=7, start_step=1)
    for damage in ("{}", "[", '{"kind": "a", "parts": 2, "of_part": {"0": {}}}'):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(UserError, match="cannot be read as the state of training"):
            read_state(tmp_path)


def test_states_are_stored_exactly(tmp_path):
    state = {
        "a": [1, 2.5, None, True, "x", (1, b"\xff")],
        "b": {1: np.arange(6, dtype=np.uint8).reshape(2, 3), "$c": np.float32(0.1)},
    }
    found = stored(StreamState("a thing", 1, {0: copy.deepcopy(state)}), tmp_path)
    assert found is not None
    np.testing.assert_equal(found.of_part[0], state)
    assert isinstance(found.of_part[0]["a"][5], tuple)
    assert found.of_part[0]["b"][1].dtype == np.uint8
    assert state_files(None) == {}


def test_the_note_says_how_it_is_read():
    stream = open_stream(divided)
    state = next(training(divided, process_count=2)).state
    found = describe("train", stream, state, 2)
    assert found == (
        "train is what divided() makes: each process reads its part; a resumed run "
        "continues where it stopped"
    )
    assert "in 2 parts, read by 4 process(es)" in describe("train", stream, state, 4)
    alone = open_stream(iter(ROWS))
    assert describe("train", alone, None, 2) == (
        "train is a list_iterator: each process reads all of it; once, without a "
        "second epoch, if it is new; without a state: a run that resumes reads it from "
        "the start and skips what it has seen"
    )


@pytest.mark.skipif(bool(importlib.util.find_spec("datasets")), reason="it is here")
def test_without_the_library_of_datasets_a_line_says_what_to_install():
    with pytest.raises(UserError, match=r"pip install 'jshard\[datasets\]'"):
        streamed_text("org/text", "train", sequence_length=8, seed=0)
