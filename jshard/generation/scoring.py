"""How likely a model finds continuations: padded batches of few shapes.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jshard.generation.prompts import context_length
from jshard.generation.weight_placement import Placement
from jshard.layout import transfer

_SHORTEST = 64


class Score(NamedTuple):
    """What a model says of a continuation.

    Attributes:
      log_p: the logarithm of its probability, in nats.
      is_greedy: whether each of its tokens is the likeliest.
    """

    log_p: float
    is_greedy: bool


class _Rows(NamedTuple):
    """Tokens, those that follow them, and which of these count."""

    inputs_BT: Any
    targets_BT: Any
    counts_BT: Any


def padded_length(count: int, context: int) -> int:
    """Returns a power of two that holds a number of tokens, or the whole context."""
    return min(max(_SHORTEST, 1 << (count - 1).bit_length()), context)


def scores(
    placement: Placement,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int,
) -> Iterator[list[tuple[int, Score]]]:
    """Yields scores of continuations, a batch at a time, the longest texts first.

    Of a text that is longer than the context, the end counts.

    Args:
      placement: a decoder.
      texts: a context and its continuation, as tokens, which have one or more each; all
        processes have all of them.
      batch_size: texts that are read together.

    Yields:
      The positions of texts in `texts`, and their scores.
    """
    context = context_length(placement.model)
    parts = [np.array([*before, *after])[-context - 1 :] for before, after in texts]
    order = sorted(range(len(texts)), key=lambda i: -len(parts[i]))
    size = -(-batch_size // placement.devices) * placement.devices
    program = placement.program("scores", _scores, donates=False)
    earlier: Any = None  # the next batch is computed while this one is read
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        rows = np.zeros((3, size, padded_length(len(parts[chosen[0]]) - 1, context)))
        rows = rows.astype(np.int32)
        for row, i in enumerate(chosen):
            last = len(parts[i]) - 1
            rows[0, row, :last], rows[1, row, :last] = parts[i][:-1], parts[i][1:]
            rows[2, row, last - len(texts[i][1]) : last] = 1
        found = program(_Rows(*map(placement.put, rows)))
        if earlier is not None:
            yield _fetched(*earlier)
        earlier = chosen, found
    if earlier is not None:
        yield _fetched(*earlier)


def _scores(model: Any, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    logits_BTV = model(rows.inputs_BT)
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    target_BT1 = jnp.take_along_axis(logits_BTV, rows.targets_BT[..., None], -1)
    log_p_BT = target_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, -1)
    counts_BT = rows.counts_BT > 0
    greedy_BT = jnp.argmax(logits_BTV, -1) == rows.targets_BT
    log_p_B = jnp.sum(log_p_BT, -1, where=counts_BT)
    return log_p_B, jnp.all(greedy_BT | ~counts_BT, -1)


def _fetched(
    chosen: list[int], found: tuple[jax.Array, jax.Array]
) -> list[tuple[int, Score]]:
    columns = zip(chosen, *map(transfer.fetch, found), strict=False)  # spare rows
    return [(i, Score(float(log_p), bool(greedy))) for i, log_p, greedy in columns]
