"""What would shorten a pipeline's step, by its ticks alone.

    python benchmarks/pipeline_ticks.py

A device enters a tick when its neighbours have ended the one before, as each sends to
both. Times are in forwards of a layer; a backward takes two, the loss what it does in
the last stage. Prints the step of each idea over today's, and today's over the closed
form: all work divided by the devices, and (p - 1) / (m v) of it on top.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jshard.sharding.pipeline.schedule import order_of

PARTS = 2  # ticks of a backward
SEND = 0.1  # of a layer's forward, where sends are not hidden


class Job(NamedTuple):
    """A pipeline of p devices with v stages each, and m micro-batches."""

    name: str
    p: int
    m: int
    v: int
    layers: int
    loss: float

    @property
    def last(self) -> int:
        """The last stage."""
        return self.p * self.v - 1

    def counts(self, last: int) -> list[int]:
        """Returns the layers of all stages if the last one has so many."""
        each, more = divmod(self.layers - last, self.last)
        return [each + (stage < more) for stage in range(self.last)] + [last]


JOBS = (
    Job("Llama 3 8B", 4, 16, 2, 32, 9),
    Job("Llama 3 8B", 4, 16, 1, 32, 9),
    Job("Llama 3 405B", 16, 64, 4, 126, 2),
    Job("Llama 3 405B", 8, 8, 8, 126, 2),
    Job("Llama 3 405B", 16, 64, 1, 126, 2),
)


def ticks(
    job: Job, owner: Callable[[int], int] | None = None, delay: int = 1, more: int = 0
) -> list[list[tuple[str, int] | None]]:
    """Returns what each device does in each tick: ("F", "B" or "L", stage).

    A loss is a tick of ``owner(i)``, or part of the last stage's backward if there is
    none. What is sent may be used ``delay`` ticks later, and so many ``more``
    micro-batches are begun before a backward.
    """
    p, m, v, last = *job[1:4], job.last
    todo = [_order(d, p, m, v, more)[::-1] for d in range(p)]
    ready: list[dict[tuple, int]] = [{} for _ in range(p)]  # from which tick
    losses: list[list[int]] = [[] for _ in range(p)]
    parts, rows = [0] * p, []
    while any(todo):
        now, row = len(rows), [None] * p
        for d in range(p):
            mine = [i for i in losses[d] if ready[d]["loss", i] <= now]
            if mine:
                losses[d].remove(mine[0])
                ready[last % p][False, last // p, mine[0]] = now + delay
                row[d] = ("L", last)
            elif todo[d]:
                forward, chunk, i = key = todo[d][-1]
                stage = chunk * p + d
                free = stage == 0 if forward else bool(parts[d])
                free |= not forward and stage == last and owner is None
                if not free and ready[d].get(key, now + 1) > now:
                    continue
                row[d] = ("F" if forward else "B", stage)
                parts[d] = 0 if forward else (parts[d] + 1) % PARTS
                if parts[d]:
                    continue
                todo[d].pop()
                to = stage + 1 if forward else stage - 1
                if 0 <= to <= last:
                    ready[to % p][forward, to // p, i] = now + delay
                elif forward and owner is not None:
                    losses[owner(i)].append(i)
                    ready[owner(i)]["loss", i] = now + delay
        rows.append(row)
    return rows


def _order(device: int, p: int, m: int, v: int, more: int) -> list:
    """Returns the order of 1F1B with backwards so many pieces later."""
    order = order_of(device, p, m, v)
    forwards, backwards = ([x for x in order if x[0] is kind] for kind in (True, False))
    first = min(more + next(i for i, x in enumerate(order) if not x[0]) - 1, m * v)
    pairs = zip(forwards[first:], backwards, strict=False)
    both = [x for pair in pairs for x in pair]
    return forwards[:first] + both + backwards[len(forwards) - first :]


def seconds(
    job: Job, rows: list, *, last: int = 0, shared: bool = False, send: float = SEND
) -> float:
    """Returns when all devices have ended, in forwards of a layer."""
    counts = job.counts(last or round(job.layers / (job.last + 1)))
    own = any(x and x[0] == "L" for row in rows for x in row)
    times, halves = np.zeros(job.p), 0
    for row in rows:
        took = np.zeros(job.p)
        for d, x in enumerate(row):
            if x is None:
                continue
            kind, stage = x
            took[d] = {"F": 1, "B": 2 / PARTS, "L": 0}[kind] * counts[stage]
            if kind == "L":
                took[d] = job.loss
            elif kind == "B" and stage == job.last and not own:
                halves += 1
                if halves % PARTS:  # the first part of its backward
                    if shared:
                        took += job.loss / job.p
                    else:
                        took[d] += job.loss
        ends = times + took + send
        if job.v == 1:  # the first and the last are no neighbours
            ends = np.pad(ends, 1)
        times = np.max([np.roll(ends, 1), ends, np.roll(ends, -1)], axis=0)
        times = times[1:-1] if job.v == 1 else times
    return float(times.max())


IDEAS: dict[str, Callable[[Job], float]] = {
    "fewer layers in the last stage": lambda job: min(
        seconds(job, ticks(job), last=n)
        for n in range(1, round(job.layers / (job.last + 1)) + 1)
    ),
    "the loss a tick": lambda job: seconds(job, ticks(job, lambda i: job.p - 1)),
    "of each device in turn": lambda job: seconds(job, ticks(job, lambda i: i % job.p)),
    "and as many more begun as devices": lambda job: seconds(
        job, ticks(job, lambda i: i % job.p, more=job.p)
    ),
    "the loss by all devices": lambda job: seconds(job, ticks(job), shared=True),
    "sends awaited a tick later": lambda job: seconds(job, ticks(job, delay=2), send=0),
}


def main() -> None:
    titles = ["job", "stages, micro-batches", "today / closed form", *IDEAS]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for job in JOBS:
        today = seconds(job, ticks(job))
        work = job.m * (3 * job.layers + job.loss) / job.p
        ideal = work * (1 + (job.p - 1) / (job.m * job.v))
        cells = [job.name, f"{job.p} x {job.v}, {job.m}", f"{today / ideal:.2f}"]
        cells += [f"{idea(job) / today:.2f}" for idea in IDEAS.values()]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
