"""The schedule: who does what when, how long it takes, and what is held meanwhile."""

import itertools

import numpy as np
import pytest

from jshard.sharding.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    IDLE,
    NONE,
    bubble,
    check_micro_batches,
    one_forward_one_backward,
)
from jshard.sharding.pipeline.stages import Stages
from jshard.system.errors import UserError

DEVICES = (1, 2, 3, 4, 8)


def sizes(p):
    """Micro-batches, ticks of a backward and stages of each of p devices."""
    for m, parts, v in itertools.product((1, 5, 12, 16), (1, 3), (1, 2, 3)):
        if v == 1 or m % p == 0:
            yield m, parts, v


@pytest.mark.parametrize("p", DEVICES)
def test_each_device_is_idle_for_the_bubble_alone(p):
    for m, parts, v in sizes(p):
        plan = one_forward_one_backward(p, m, parts, v)
        assert len(plan.does) == (m * v + p - 1) * (1 + parts)
        np.testing.assert_allclose(np.mean(plan.does == IDLE, axis=0), bubble(p, m, v))


@pytest.mark.parametrize("p", DEVICES)
def test_work_comes_in_order_and_after_what_it_needs(p):
    for m, parts, v in sizes(p):
        when = _when(one_forward_one_backward(p, m, parts, v))
        assert len(when) == p * v * m * (1 + parts)
        last, end = BACKWARD + parts - 1, p * v - 1
        for (stage, does, i), tick in when.items():
            if does == FORWARD and stage:
                assert when[stage - 1, FORWARD, i] < tick
            if does == BACKWARD:
                assert when[stage, FORWARD, i] < tick
                if stage < end:
                    assert when[stage + 1, last, i] < tick
            if does > BACKWARD:
                assert when[stage, does - 1, i] == tick - 1
            if i:
                assert when[stage, does, i - 1] < tick
        # The loss reads what the latest forward of the last device has made.
        latest = {
            t for (k, does, _), t in when.items() if does == FORWARD and k % p == p - 1
        }
        for i in range(m):
            made, read = when[end, FORWARD, i], when[end, BACKWARD, i]
            assert not latest & set(range(made + 1, read))


@pytest.mark.parametrize("p", DEVICES)
def test_a_device_holds_no_more_than_the_known_number_of_micro_batches(p):
    for m, parts, v in sizes(p):
        plan = one_forward_one_backward(p, m, parts, v)
        forwards = np.cumsum(plan.does == FORWARD, axis=0)
        backwards = np.cumsum(plan.does == BACKWARD + parts - 1, axis=0)
        # Before a tick's end: a backward still reads what it ends.
        held = forwards - np.concatenate([np.zeros_like(backwards[:1]), backwards[:-1]])
        held = held.max(axis=0)
        most = min(p, m) if v == 1 else min(p * v + p - 1, m * v)
        assert plan.activations == held.max() == most
        if v == 1:
            assert (held <= np.minimum(p - np.arange(p), m)).all()
        assert plan.waiting <= 4


@pytest.mark.parametrize("p", DEVICES)
def test_what_a_device_takes_is_what_its_neighbour_has_sent(p):
    """Slots, followed as a device does: nothing is overwritten before it is read."""
    for m, parts, v in sizes(p):
        plan, last = one_forward_one_backward(p, m, parts, v), p * v - 1
        slots = [[{}, {}, {}] for _ in range(p)]  # sent ahead, sent back, kept
        for tick, d in itertools.product(range(len(plan.does)), range(p)):
            does, i = plan.does[tick, d], plan.micro[tick, d]
            stage, taken = plan.chunk[tick, d] * p + d, plan.takes[tick, d]
            if does == FORWARD:
                assert (taken == NONE) == (stage == 0)
                assert stage == 0 or slots[d][0].pop(taken) == (stage, i)
                slots[d][2][plan.keeps[tick, d]] = stage, i
            elif does:
                assert does > BACKWARD or (taken == NONE) == (stage == last)
                assert taken == NONE or slots[d][1].pop(taken) == (stage, i)
                assert slots[d][2][plan.keeps[tick, d]] == (stage, i)
            if d < p - 1:
                continue
            for to in range(p):  # at the end of the tick
                for way, arriving in enumerate((plan.arriving, plan.returning)):
                    if (slot := arriving[tick, to]) != NONE:
                        source = (to - 1 if way == 0 else to + 1) % p
                        k = (
                            plan.chunk[tick, source] * p
                            + source
                            + (1 if way == 0 else -1)
                        )
                        assert k % p == to
                        assert slot not in slots[to][way]
                        slots[to][way][slot] = k, plan.micro[tick, source]


def _when(plan):
    tick, device = np.nonzero(plan.does != IDLE)
    p = plan.does.shape[1]
    return {
        (
            int(plan.chunk[t, d]) * p + int(d),
            int(plan.does[t, d]),
            int(plan.micro[t, d]),
        ): t
        for t, d in zip(tick, device, strict=True)
    }


def test_interleaved_stages_take_micro_batches_in_groups():
    check_micro_batches(4, 6, 1)
    with pytest.raises(UserError, match=r"accumulate=6 is not a multiple .* choose 8"):
        check_micro_batches(4, 6, 2)


@pytest.mark.parametrize("per_device", [1, 2])
@pytest.mark.parametrize(
    ("layers", "devices"), [(3, 2), (5, 4), (6, 4), (8, 4), (9, 5), (11, 3)]
)
def test_each_layer_has_a_row_of_a_device(layers, devices, per_device):
    found = Stages(("blocks",), layers, devices, per_device)
    if layers < found.number:
        pytest.skip("fewer layers than stages")
    rows, used = found.rows(), found.used()
    size = -(-layers // found.number)
    assert rows.shape == used.shape == (devices, per_device * size)
    assert used.sum() == layers
    assert sum(found.counts()) == layers
    assert max(found.counts()) - min(found.counts()) <= 1
    # Stage k is chunk k // p of device k % p, and its layers follow those of k - 1.
    stages = np.argsort(np.arange(found.number).reshape(per_device, devices).T.ravel())
    in_order = rows.reshape(found.number, size)[stages]
    assert in_order[used.reshape(found.number, size)[stages]].tolist() == [
        *range(layers)
    ]


@pytest.mark.parametrize(
    ("layers", "per_device", "counts"),
    [(5, 1, [2, 1, 1, 1]), (7, 1, [2, 2, 2, 1]), (9, 2, [2, 1, 1, 1, 1, 1, 1, 1])],
)
def test_the_first_stages_have_a_layer_more(layers, per_device, counts):
    """The last one has the loss to compute."""
    assert Stages(("blocks",), layers, 4, per_device).counts() == counts
