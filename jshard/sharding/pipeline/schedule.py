"""Interleaved 1F1B: what each device of a pipeline does in each tick.

Each of p devices has v stages, its chunks: stage k is chunk k // p of device k % p.
With one, this is plain 1F1B. A tick is as long as a stage's forward: a backward, which
takes about two or three times as long, is divided by layers into as many ticks. With
ticks of one length no device waits for another's longer one, and it is idle for p - 1
of m v + p - 1 forwards and backwards of a stage (Narayanan et al. 2021, section 2.2).
"""

from typing import NamedTuple

import numpy as np

from jshard.system.errors import UserError

IDLE, FORWARD, BACKWARD = 0, 1, 2  # the first part of a backward; others follow
NONE = -1  # no slot


class Schedule(NamedTuple):
    """What happens when, (ticks, devices) each.

    A slot is a place in a device's memory for what belongs to a chunk and a
    micro-batch, from when it arrives until it is used.

    Attributes:
      does: IDLE, FORWARD, or BACKWARD + part.
      micro: with which micro-batch.
      chunk: with which of the device's stages.
      takes: the slot of what a forward, or the first part of a backward, has been sent.
      keeps: the slot of what a backward needs of its forward.
      arriving: the slot of what comes from the stage before at the end of the tick.
      returning: the slot of what comes from the next stage at the end of the tick.
      activations: the number of slots for what backwards need.
      waiting: the number of slots for what is sent, in either direction.
    """

    does: np.ndarray
    micro: np.ndarray
    chunk: np.ndarray
    takes: np.ndarray
    keeps: np.ndarray
    arriving: np.ndarray
    returning: np.ndarray
    activations: int
    waiting: int

    def rows(self) -> np.ndarray:
        """Returns all tables as one, (ticks, 7, devices)."""
        return np.stack(self[:7], axis=1)


def one_forward_one_backward(
    devices: int, micro_batches: int, parts: int, per_device: int = 1
) -> Schedule:
    """Returns the schedule; ``parts`` are the ticks of a backward.

    Each device does its work in the order of ``order_of``, each piece as soon as its
    neighbours have sent what it needs, in an earlier tick.

    Raises:
      UserError: as ``check_micro_batches``.
    """
    check_micro_batches(devices, micro_batches, per_device)
    sizes = devices, micro_batches, per_device
    todo = [order_of(device, *sizes)[::-1] for device in range(devices)]
    # The slot of each (chunk, micro-batch) that has one, by device.
    inputs, cotangents, kept = ([{} for _ in range(devices)] for _ in range(3))
    last, part, rows = devices * per_device - 1, [0] * devices, []
    while any(todo):
        row = np.full((7, devices), NONE, np.int32)
        row[:3] = 0  # IDLE
        ended = []  # (forward?, stage, micro-batch) of this tick
        for d in range(devices):
            if not todo[d]:
                continue
            forward, chunk, i = todo[d][-1]
            stage, key = chunk * devices + d, (chunk, i)
            sent = inputs[d] if forward else cotangents[d]
            ready = stage == (0 if forward else last) or part[d] or key in sent
            if not ready:
                continue
            row[:3, d] = FORWARD if forward else BACKWARD + part[d], i, chunk
            row[3, d] = sent.pop(key, NONE)
            row[4, d] = _take_free(kept[d], key) if forward else kept[d][key]
            part[d] = 0 if forward else (part[d] + 1) % parts
            if not part[d]:
                ended.append((*todo[d].pop()[:1], stage, i))
        for forward, stage, i in ended:
            if not forward:
                kept[stage % devices].pop((stage // devices, i))
            to = stage + 1 if forward else stage - 1
            if 0 <= to <= last:
                chunk, d = divmod(to, devices)
                sent = inputs[d] if forward else cotangents[d]
                row[5 if forward else 6, d] = _take_free(sent, (chunk, i))
        rows.append(row)
    tables = np.stack(rows, axis=1)
    most = tables.max(axis=(1, 2)) + 1
    return Schedule(*tables, activations=most[4], waiting=max(1, most[5], most[6]))


def _take_free(slots: dict[tuple[int, int], int], key: tuple[int, int]) -> int:
    taken = set(slots.values())
    slots[key] = next(i for i in range(len(taken) + 1) if i not in taken)
    return slots[key]


def order_of(
    device: int, devices: int, micro_batches: int, per_device: int
) -> list[tuple[bool, int, int]]:
    """Returns (forward?, chunk, micro-batch) of what a device does, in order.

    As many micro-batches as there are devices pass a chunk, then the next chunk. The
    first forwards fill the pipeline; then one forward and one backward alternate.
    """
    groups = [
        range(start, min(start + devices, micro_batches))
        for start in range(0, micro_batches, devices)
    ]
    chunks = range(per_device)
    forwards = [(True, c, i) for group in groups for c in chunks for i in group]
    backwards = [(False, c, i) for group in groups for c in chunks[::-1] for i in group]
    after = devices - 1 - device
    first = after if per_device == 1 else 2 * after + (per_device - 1) * devices
    first = min(first, len(forwards))
    pairs = zip(forwards[first:], backwards, strict=False)
    both = [piece for pair in pairs for piece in pair]
    return forwards[:first] + both + backwards[len(forwards) - first :]


def check_micro_batches(devices: int, micro_batches: int, per_device: int) -> None:
    """Raises UserError if interleaved stages would wait for micro-batches."""
    if per_device > 1 and micro_batches % devices:
        more = -(-micro_batches // devices) * devices
        raise UserError(
            f"mesh: pipe={devices}: policy.stages_per_device={per_device} takes "
            f"micro-batches in groups of {devices}, and policy.accumulate="
            f"{micro_batches} is not a multiple of that; choose {more}"
        )


# What follows from the sizes alone.


def parts_of(remat: object, layers: int) -> int:
    """Returns the ticks of a backward, each as long as a forward, of so many layers.

    A layer's backward takes about two forwards, and one more that it computes again.
    """
    return min(3 if remat == "full" else 2, layers)


def bubble(devices: int, micro_batches: int, per_device: int = 1) -> float:
    """Returns the part of a step in which a device is idle."""
    return (devices - 1) / (micro_batches * per_device + devices - 1)
