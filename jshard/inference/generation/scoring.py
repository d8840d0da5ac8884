"""How likely a model finds continuations: padded batches of few shapes.

Continuations of one context that differ in their last tokens alone, such as the letters
of the answers to a question, are one row.

Shape suffixes: B rows, T tokens, V vocabulary, K last tokens.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jshard.inference.generation.prompts import context_length
from jshard.inference.generation.weight_placement import Placement
from jshard.sharding.layout.values import transfer

# A context and its continuation, as tokens, which have one or more each.
Text: TypeAlias = tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]

_SHORTEST = 64
_FEWEST_ENDS = 4  # of a program, so that most questions need one


class Score(NamedTuple):
    """What a model says of a continuation.

    Attributes:
      log_p: the logarithm of its probability, in nats.
      is_greedy: whether each of its tokens is the likeliest.
    """

    log_p: float
    is_greedy: bool


class _Rows(NamedTuple):
    """Tokens, those that follow them, which of these count, and the last ones' place.

    Every one of the last tokens follows the same tokens.
    """

    inputs_BT: Any
    targets_BT: Any
    counts_BT: Any
    place_B1: Any
    ends_BK: Any


def padded_length(count: int, context: int) -> int:
    """Returns a power of two that holds a number of tokens, or the whole context."""
    return min(max(_SHORTEST, 1 << (count - 1).bit_length()), context)


def scores(
    placement: Placement,
    texts: Sequence[Text],
    batch_size: int,
) -> Iterator[list[tuple[int, Score]]]:
    """Yields scores of continuations, a batch at a time, the longest texts first.

    Of a text that is longer than the context, the end counts.

    Args:
      placement: a decoder.
      texts: all processes have all of them.
      batch_size: rows that are read together.

    Yields:
      The positions of texts in `texts`, and their scores.
    """
    context = context_length(placement.model)
    groups = sorted(_groups(texts, context), key=lambda group: -len(group[0]))
    size = -(-batch_size // placement.devices) * placement.devices
    program = placement.program("scores", _scores, donates=False)
    earlier: Any = None  # the next batch is computed while this one is read
    for start in range(0, len(groups), size):
        chosen = groups[start : start + size]
        rows = _rows(chosen, texts, size, padded_length(len(chosen[0][0]), context))
        found = program(_Rows(*map(placement.put, rows)))
        if earlier is not None:
            yield _fetched(*earlier)
        earlier = [members for _, members in chosen], found
    if earlier is not None:
        yield _fetched(*earlier)


def _groups(texts: Sequence[Text], context: int) -> list[tuple[np.ndarray, list[int]]]:
    """Returns what a model reads for some of the texts, and their positions."""
    members = collections.defaultdict(list)
    for i, (before, after) in enumerate(texts):
        read = np.array([*before, *after][-context - 1 : -1], np.int32)
        members[len(after), read.tobytes()].append(i)
    return [(np.frombuffer(x, np.int32), those) for (_, x), those in members.items()]


def _rows(
    groups: Sequence[tuple[np.ndarray, list[int]]],
    texts: Sequence[Text],
    size: int,
    length: int,
) -> _Rows:
    """Returns rows of that size and length; spare ones count nothing."""
    most = max(len(members) for _, members in groups)
    rows = _Rows(
        *np.zeros((3, size, length), np.int32),
        place_B1=np.zeros((size, 1), np.int32),
        ends_BK=np.zeros(
            (size, max(_FEWEST_ENDS, 1 << (most - 1).bit_length())), np.int32
        ),
    )
    for row, (read, members) in enumerate(groups):
        last = len(read) - 1
        rows.inputs_BT[row, : last + 1] = read
        rows.targets_BT[row, :last] = read[1:]
        rows.counts_BT[row, last + 1 - len(texts[members[0]][1]) : last] = 1
        rows.place_B1[row] = last
        rows.ends_BK[row, : len(members)] = [texts[i][1][-1] for i in members]
    return rows


def _scores(model: Any, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    logits_BTV = model(rows.inputs_BT)
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    target_BT1 = jnp.take_along_axis(logits_BTV, rows.targets_BT[..., None], -1)
    total_BT, best_BT = jax.nn.logsumexp(logits_BTV, -1), jnp.argmax(logits_BTV, -1)
    counts_BT = rows.counts_BT > 0
    log_p_B = jnp.sum(target_BT1[..., 0] - total_BT, -1, where=counts_BT)
    greedy_B = jnp.all((best_BT == rows.targets_BT) | ~counts_BT, -1)

    last_BV = jnp.take_along_axis(logits_BTV, rows.place_B1[..., None], 1)[:, 0]
    end_BK = jnp.take_along_axis(last_BV, rows.ends_BK, -1)
    end_BK -= jnp.take_along_axis(total_BT, rows.place_B1, 1)
    best_B1 = jnp.take_along_axis(best_BT, rows.place_B1, 1)
    return log_p_B[:, None] + end_BK, greedy_B[:, None] & (best_B1 == rows.ends_BK)


def _fetched(
    groups: list[list[int]], found: tuple[jax.Array, jax.Array]
) -> list[tuple[int, Score]]:
    log_p_BK, greedy_BK = map(transfer.fetch, found)
    return [
        (i, Score(float(log_p_BK[row, k]), bool(greedy_BK[row, k])))
        for row, members in enumerate(groups)
        for k, i in enumerate(members)
    ]
