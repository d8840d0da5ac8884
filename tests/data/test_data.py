"""Data: the batches of a step, and of an evaluation."""

import json
from typing import Any

import grain
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jshard.data.batches import TrainingBatches, batches, eval_batches, last_sizes
from jshard.data.dataset import as_dataset
from jshard.data.position import position_files, read_position
from jshard.system.cli.user_code import describe_user_error
from jshard.system.errors import UserError
from texts import epoch, text, window

PROCESS_COUNTS = (1, 2, 4)


def examples(count):
    """A finite dataset whose example i is {"x": [i, -i], "weights": 1}."""
    return grain.MapDataset.range(count).map(
        lambda i: {"x": np.array([i, -i], np.int32), "weights": np.float32(1)}
    )


def x(example):
    return example["x"][..., 0]


# Batches of a step.


@settings(max_examples=10)
@given(
    per_process=st.integers(1, 3),
    process_count=st.sampled_from(PROCESS_COUNTS),
    start=st.integers(0, 8),
    seed=st.integers(0, 2**32 - 1),
    num_threads=st.sampled_from([0, 3]),
)
def test_the_batch_of_a_step_does_not_depend_on_start_processes_or_threads(
    per_process, process_count, start, seed, num_threads
):
    # 23 examples, so that batches cross the ends of epochs.
    dataset = examples(23).seed(seed).shuffle().repeat()
    batch_size = per_process * process_count
    parts = [
        list(
            batches(
                dataset,
                batch_size=batch_size,
                start_step=start,
                num_steps=8,
                process_index=index,
                process_count=process_count,
                num_threads=num_threads,
            )
        )
        for index in range(process_count)
    ]
    assert [len(part) for part in parts] == [8 - start] * process_count
    for number, local in enumerate(zip(*parts, strict=True)):
        step = start + number
        rows = range(step * batch_size, (step + 1) * batch_size)
        expected = np.stack([window(dataset, row)["x"] for row in rows])
        np.testing.assert_array_equal(np.concatenate([b["x"] for b in local]), expected)


def test_starting_at_step_7_equals_skipping_to_step_7():
    def from_step(start):
        dataset = examples(23).seed(3).shuffle().repeat()
        return list(batches(dataset, batch_size=4, start_step=start, num_steps=10))

    for resumed, skipped in zip(from_step(7), from_step(0)[7:], strict=True):
        np.testing.assert_array_equal(resumed["x"], skipped["x"])


@pytest.mark.parametrize("processes", [1, 2])
def test_steps_of_another_batch_size_go_on_after_the_examples_read_before(processes):
    dataset = examples(23).seed(3).shuffle().repeat()
    found, position = [], 0
    for steps, batch_size in ((3, 4), (2, 10), (4, 2)):
        parts = [
            batches(
                dataset,
                batch_size=batch_size,
                start_step=5,  # of the run: what it read before is a number of examples
                num_steps=5 + steps,
                first_example=position,
                process_index=index,
                process_count=processes,
            )
            for index in range(processes)
        ]
        for rows in zip(*parts, strict=True):
            found += [x for part in rows for x in part["x"]]
        position += steps * batch_size
        assert len(found) == position
    want = [window(dataset, row)["x"] for row in range(position)]
    np.testing.assert_array_equal(found, want)


def test_a_position_is_what_a_checkpoint_says_or_its_steps_times_its_batch_size(
    tmp_path,
):
    assert read_position(tmp_path, 3, 8) == 24  # of an earlier version
    groups = {key: {} for key in ("versions", "mesh", "metrics", "arrays")}
    about = {"step": 3, "processes": 1, "created": "today", "stacks": [], **groups}
    config = {"config": {"batch_size": 4}}
    (tmp_path / "description.json").write_text(json.dumps(about | config))
    assert read_position(tmp_path, 3, 8) == 12
    for name, content in position_files(20).items():
        (tmp_path / name).write_text(content)
        assert read_position(tmp_path, 3, 8) == 20
        for damage in ("{}", "[", '{"examples": -1}', '{"examples": true}'):
            (tmp_path / name).write_text(damage)
            with pytest.raises(UserError, match=f"{name}: cannot be read as a posi"):
                read_position(tmp_path, 3, 8)


def test_each_epoch_has_each_window_once_in_an_order_of_its_own(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(401, dtype=np.uint16).tofile(file)
    data = text(file, validation_fraction=0)
    orders = [epoch(data, number, 50)[:, 0] for number in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, 400, 8))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])


def test_the_next_seed_is_not_the_next_epoch(tmp_path):
    file = tmp_path / "a.bin"
    np.arange(401, dtype=np.uint16).tofile(file)
    second_epoch = epoch(text(file, seed=0), 1, 47)
    first_epoch = epoch(text(file, seed=1), 0, 47)
    assert not np.array_equal(second_epoch, first_epoch)


def test_batches_end_with_finite_data():
    with pytest.raises(UserError, match=r"after 10 examples.*end make_data with"):
        batches(examples(10), batch_size=4, start_step=0, num_steps=3)


def test_batches_must_divide_over_the_processes():
    for read in (
        lambda **k: batches(examples(9).repeat(), start_step=0, num_steps=1, **k),
        lambda **k: eval_batches(examples(9), **k),
    ):
        with pytest.raises(UserError, match="batch_size=6 is not divisible by 4"):
            read(batch_size=6, process_index=0, process_count=4)
        with pytest.raises(UserError, match="is not divisible by"):
            read(batch_size=0)
        with pytest.raises(ValueError, match="process_index=2 is not in"):
            read(batch_size=2, process_index=2, process_count=2)


def test_steps_are_counted_from_0():
    with pytest.raises(UserError, match="start_step=-1"):
        batches(examples(9).repeat(), batch_size=1, start_step=-1, num_steps=1)


def test_a_mistake_found_while_reading_reaches_the_loop_as_itself(tmp_path):
    file = tmp_path / "a.bin"
    tokens = np.zeros(20_001, np.uint16)
    tokens[15_000] = 99
    tokens.tofile(file)
    data = text(file, validation_fraction=0, vocab_size=99)
    with pytest.raises(UserError, match=r"a\.bin: token 99 at position 15000"):
        list(batches(data, batch_size=10, start_step=0, num_steps=250))


# Evaluation.


@settings(max_examples=30)
@given(
    count=st.integers(1, 30),
    per_device=st.integers(1, 3),
    per_process=st.integers(1, 3),
    process_count=st.sampled_from(PROCESS_COUNTS),
    max_batches=st.none() | st.integers(1, 8),
    streamed=st.booleans(),
)
def test_evaluation_sees_every_example_once_in_order_on_equally_many_batches(
    count, per_device, per_process, process_count, max_batches, streamed
):
    devices = per_process * process_count
    batch_size = per_device * devices
    dataset: Any = examples(count)
    if streamed:
        dataset = as_dataset(examples(count).__iter__, 0, repeat=False)
    parts = [
        list(
            eval_batches(
                dataset,
                batch_size=batch_size,
                devices=devices,
                process_index=index,
                process_count=process_count,
                max_batches=max_batches,
                num_threads=0,
            )
        )
        for index in range(process_count)
    ]
    seen, full = [], min(count // batch_size, max_batches or count)
    for number, local in enumerate(zip(*parts, strict=True)):
        (some,) = {batch.examples for batch in local}
        rows = np.concatenate([batch.rows["x"] for batch in local])
        assert number >= full or (len(rows), some) == (batch_size, None)
        if some is not None:
            assert len(rows) == devices > some > 0
            assert {*rows[some:, 0]} == {count - 1}
        assert len(rows) % devices == 0
        seen += list(rows[:some, 0])
    assert len(parts[0]) <= full + 2
    wanted = min(count, batch_size * (max_batches or count))
    assert seen == list(range(wanted))
    if not streamed:
        sizes = [(batch_size, None)] * full
        sizes += last_sizes(dataset, batch_size, devices, max_batches)
        got = [(len(x.rows["x"]) * process_count, x.examples) for x in parts[0]]
        assert got == sizes


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (examples(4).repeat(), {}, r"infinite: leave out \.repeat\(\)"),
        (examples(4)[:0], {}, "no examples"),
        (examples(4), {"max_batches": 0}, "max_batches=0"),
        (None, {}, "make_data returned None .*eval_every=0"),
    ],
)
def test_evaluation_refuses(dataset, options, message):
    with pytest.raises(UserError, match=message):
        eval_batches(dataset, batch_size=2, **options)


def test_a_stop_iteration_of_an_example_is_an_error_at_its_line_and_no_end():
    def example(index: int) -> dict[str, Any]:
        if index == 10:
            next(iter(()))
        return {"x": np.float32(index)}

    data = grain.MapDataset.range(40).map(example)
    read = TrainingBatches(data, None, batch_size=4, start_step=0, num_steps=10)
    with pytest.raises(RuntimeError, match="before the end of the data") as error:
        list(read)
    line, _ = describe_user_error(error.value) or ("", "")
    assert f"test_data.py:{example.__code__.co_firstlineno + 2}: RuntimeError" in line
    with pytest.raises(RuntimeError, match="before the end of the data"):
        list(eval_batches(data, batch_size=4))
    data = grain.MapDataset.range(40).map(lambda index: {"x": np.float32(index)})
    read = TrainingBatches(data, None, batch_size=4, start_step=7, num_steps=10)
    assert len(list(read)) == 3
