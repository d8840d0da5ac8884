"""One forward, one backward: what each stage of a pipeline does in each tick.

A device holds the activations of at most as many micro-batches as there are stages from
its own to the last. A tick is as long as a stage's forward: a backward, which takes
about two or three times as long, is divided by layers into as many ticks. With ticks of
one length no stage waits for another's longer one, and p stages are idle for p - 1 of
m + p - 1 micro-batches, as in PipeDream-Flush (Narayanan et al. 2021, section 2.2).
"""

from typing import NamedTuple

import numpy as np

IDLE, FORWARD, BACKWARD = 0, 1, 2  # the first part of a backward; others follow


class Schedule(NamedTuple):
    """What happens when.

    Attributes:
      does: IDLE, FORWARD, or BACKWARD + part, (ticks, stages).
      micro: with which micro-batch, (ticks, stages).
      activations: the number of micro-batches whose activations a stage may hold.
      waiting: the number that may wait for a stage's forward, or for its backward.
    """

    does: np.ndarray
    micro: np.ndarray
    activations: int
    waiting: int

    def rows(self, parts: int) -> np.ndarray:
        """Returns what each stage does in each tick, and what it then receives.

        (ticks, 4, stages): what it does and with which micro-batch; the micro-batch
        whose activations arrive from the stage before, and that whose gradient comes
        from the next one, or -1.
        """
        made = np.where(self.does == FORWARD, self.micro, -1)
        ended = np.where(self.does == BACKWARD + parts - 1, self.micro, -1)
        nothing = np.full_like(made[:, :1], -1)
        arriving = np.concatenate([nothing, made[:, :-1]], axis=1)
        returning = np.concatenate([ended[:, 1:], nothing], axis=1)
        return np.stack([self.does, self.micro, arriving, returning], axis=1)


def one_forward_one_backward(stages: int, micro_batches: int, parts: int) -> Schedule:
    """Returns the schedule; ``parts`` are the ticks of a backward.

    A stage continues its backward, or begins one, or runs a forward, whichever is first
    possible: what a stage needs, its neighbour has sent in an earlier tick.
    """
    forwards, backwards = [0] * stages, [0] * stages  # how many are done
    part = [0] * stages  # the part of the backward that comes next
    last, rows, held, waiting = stages - 1, [], 0, 0
    while backwards[0] < micro_batches:
        row, sent, returned = [], list(forwards), list(backwards)
        for s in range(stages):
            done = sent[s] if s == last else returned[s + 1]
            comes = micro_batches if s == 0 else sent[s - 1]
            waiting = max(waiting, *([comes - sent[s]] if s else []), 1)
            waiting = max(waiting, *([done - returned[s]] if s < last else []), 1)
            if part[s] or returned[s] < done:
                row.append((BACKWARD + part[s], backwards[s]))
                part[s] = (part[s] + 1) % parts
                backwards[s] += not part[s]
            elif sent[s] < comes and sent[s] - returned[s] < stages - s:
                row.append((FORWARD, forwards[s]))
                forwards[s] += 1
            else:
                row.append((IDLE, 0))
        held = max(held, *(f - b for f, b in zip(forwards, backwards, strict=True)))
        rows.append(row)
    table = np.array(rows, np.int32)
    return Schedule(table[..., 0], table[..., 1], held, waiting)


def bubble(stages: int, micro_batches: int) -> float:
    """Returns the part of a step in which a stage is idle."""
    return (stages - 1) / (micro_batches + stages - 1)
