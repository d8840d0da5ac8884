"""The schedule: who does what when, how long it takes, and what is held meanwhile."""

import itertools

import numpy as np
import pytest

from jshard.pipe.schedule import (
    BACKWARD,
    FORWARD,
    IDLE,
    bubble,
    one_forward_one_backward,
)
from jshard.pipe.stages import Stages

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 5, 16), (1, 2, 3)))


@pytest.mark.parametrize(("stages", "micro", "parts"), SIZES)
def test_each_stage_is_idle_for_the_bubble_alone(stages, micro, parts):
    plan = one_forward_one_backward(stages, micro, parts)
    assert len(plan.does) == (micro + stages - 1) * (1 + parts)
    idle = np.mean(plan.does == IDLE, axis=0)
    np.testing.assert_allclose(idle, bubble(stages, micro))


@pytest.mark.parametrize(("stages", "micro", "parts"), SIZES)
def test_work_comes_in_order_and_after_what_it_needs(stages, micro, parts):
    plan = one_forward_one_backward(stages, micro, parts)
    when = {
        (stage, does, i): tick
        for tick, (row, numbers) in enumerate(zip(plan.does, plan.micro, strict=True))
        for stage, (does, i) in enumerate(zip(row, numbers, strict=True))
        if does != IDLE
    }
    assert len(when) == stages * micro * (1 + parts)
    last = BACKWARD + parts - 1
    for (stage, does, i), tick in when.items():
        if does == FORWARD and stage:
            assert when[stage - 1, FORWARD, i] < tick
        if does == BACKWARD:
            assert when[stage, FORWARD, i] < tick
            if stage < stages - 1:
                assert when[stage + 1, last, i] < tick
        if does > BACKWARD:
            assert when[stage, does - 1, i] == tick - 1
        if i:
            assert when[stage, does, i - 1] < tick


@pytest.mark.parametrize(("stages", "micro", "parts"), SIZES)
def test_a_stage_holds_no_more_micro_batches_than_stages_follow(stages, micro, parts):
    plan = one_forward_one_backward(stages, micro, parts)
    forwards = np.cumsum(plan.does == FORWARD, axis=0)
    backwards = np.cumsum(plan.does == BACKWARD + parts - 1, axis=0)
    # Before a tick's end: a backward still reads what it ends.
    held = forwards - np.concatenate([np.zeros_like(backwards[:1]), backwards[:-1]])
    held = held.max(axis=0)
    assert (held <= np.minimum(stages - np.arange(stages), micro)).all()
    assert plan.activations == held.max()
    assert plan.waiting <= 2


def test_what_is_sent_arrives():
    plan = one_forward_one_backward(3, 4, 2)
    rows = plan.rows(2)
    sent = {(t, s + 1, i) for t, s, i in _of(plan, FORWARD) if s < 2}
    returned = {(t, s - 1, i) for t, s, i in _of(plan, BACKWARD + 1) if s > 0}
    for row, expected in ((2, sent), (3, returned)):
        found = {
            (t, s, int(rows[t, row, s]))
            for t, s in zip(*np.nonzero(rows[:, row] >= 0), strict=True)
        }
        assert found == expected


def _of(plan, does):
    return [
        (t, s, int(plan.micro[t, s]))
        for t, s in zip(*np.nonzero(plan.does == does), strict=True)
    ]


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (5, 4), (6, 4), (8, 4), (9, 5)])
def test_each_layer_has_a_row_of_a_stage(layers, stages):
    found = Stages(("blocks",), layers, stages)
    rows, used = found.rows(), found.used()
    assert rows.shape == used.shape == (stages, -(-layers // stages))
    np.testing.assert_array_equal(rows[used], np.arange(layers))
    np.testing.assert_array_equal(
        rows.reshape(-1)[found.row_of_layer()], np.arange(layers)
    )
    assert found.counts() == used.sum(axis=1).tolist()
    assert max(found.counts()) - min(found.counts()) <= 1
