"""Decoding with a cache, as functions of a model to be traced inside a jit.

A decoder has ``init_cache(batch, length)``, which returns zeros (B, ...), and
``decode(tokens_BT, positions_BT, cache)``, which returns logits (B, T, V) and the cache
with these tokens; positions of -1 are padding. It continues its prompts.

An encoder-decoder has ``encode(inputs_BS, mask_BS, length)`` in place of
``init_cache``: it returns a cache that holds what ``decode`` reads of the inputs, with
room for ``length`` tokens. The first of them is ``config.start_token``.

Shape suffixes: B rows, S tokens of inputs, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jshard.inference.generation.sampling import Sampling, sample

NOTHING = -1  # in place of the tokens after a row's end


class Rows(NamedTuple):
    """Texts that are being generated, one a row.

    Attributes:
      token_B: the latest token of each row, which is not in the cache yet.
      position_B: its position.
      end_B: a row is done when its position reaches this one.
      seed_B: seeds of the random choices, uint32.
      cache: keys and values of the tokens before.
    """

    token_B: jax.Array
    position_B: jax.Array
    end_B: jax.Array
    seed_B: jax.Array
    cache: Any


def prefill(model: Any, tokens_BT: Any, positions_BT: Any, cache: Any) -> Any:
    """Returns the cache with several tokens of each prompt."""
    return model.decode(tokens_BT, positions_BT, cache)[1]


def decode_steps(
    model: Any,
    rows: Rows,
    *,
    count: int,
    sampling: Sampling,
    stop_tokens: Sequence[int] = (),
) -> tuple[Rows, jax.Array]:
    """Generates ``count`` tokens in each row.

    A random choice depends on the row's seed and the token's position alone.

    Returns:
      The rows, and the new tokens (B, count). A stop token ends its row; in its place,
      and after a row's end, is ``NOTHING``.
    """

    def step(rows: Rows, _: None) -> tuple[Rows, jax.Array]:
        going_B = rows.position_B < rows.end_B
        position_B = jnp.where(going_B, rows.position_B, -1)
        logits_BTV, cache = model.decode(
            rows.token_B[:, None], position_B[:, None], rows.cache
        )
        next_B = rows.position_B + 1
        token_B = jax.vmap(_choose, (0, 0, 0, None))(
            rows.seed_B, next_B, logits_BTV[:, 0], sampling
        )
        stops_B = jnp.isin(token_B, jnp.asarray(stop_tokens, jnp.int32))
        rows = Rows(
            jnp.where(going_B, token_B, rows.token_B),
            jnp.where(going_B, next_B, rows.position_B),
            jnp.where(stops_B, 0, rows.end_B),
            rows.seed_B,
            cache,
        )
        return rows, jnp.where(going_B & ~stops_B, token_B, NOTHING)

    rows, tokens_TB = lax.scan(step, rows, None, length=count)
    return rows, tokens_TB.T


def _choose(
    seed: jax.Array, position: jax.Array, logits_V: jax.Array, sampling: Sampling
) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return sample(key, logits_V, sampling)


def continue_prompts(
    model: Any, prompts: dict[str, jax.Array], *, length: int, temperature: float = 0.8
) -> jax.Array:
    """Samples ``length`` tokens after prompts of one length, in a single traced call.

    It is the ``generate`` of a recipe's ``sample(config)``.

    Args:
      model: in eval mode.
      prompts: ``tokens`` (B, T) and ``seed`` (B,), one random seed a row.
      length: tokens to sample; T + length must not exceed the model's context.
      temperature: of the softmax; 0 takes the likeliest token.

    Returns:
      Tokens (B, T + length).
    """
    tokens_BT, seed_B = prompts["tokens"], prompts["seed"]
    B, T = tokens_BT.shape
    cache = model.init_cache(B, T + length)
    if T > 1:
        positions_BT = jnp.broadcast_to(jnp.arange(T - 1), (B, T - 1))
        cache = prefill(model, tokens_BT[:, :-1], positions_BT, cache)
    ends = jnp.full(B, T - 1), jnp.full(B, T - 1 + length)
    rows = Rows(tokens_BT[:, -1], *ends, seed_B, cache)
    sampling = Sampling(temperature)
    _, new_BT = decode_steps(model, rows, count=length, sampling=sampling)
    return jnp.concatenate([tokens_BT, new_BT], axis=1)


def answer_inputs(
    model: Any, inputs: dict[str, jax.Array], *, length: int, temperature: float = 0.0
) -> jax.Array:
    """Samples an encoder-decoder's ``length`` tokens, in a single traced call.

    Args:
      model: in eval mode.
      inputs: ``inputs`` (B, S), ``mask`` (B, S), which of them are not padding, and
        ``seed`` (B,), one random seed a row.
      length: tokens to sample.
      temperature: of the softmax; 0 takes the likeliest token.

    Returns:
      Tokens (B, length).
    """
    inputs_BS, seed_B = inputs["inputs"], inputs["seed"]
    B = inputs_BS.shape[0]
    cache = model.encode(inputs_BS, inputs["mask"], length)
    start_B = jnp.full(B, model.config.start_token, jnp.int32)
    ends = jnp.zeros(B, jnp.int32), jnp.full(B, length, jnp.int32)
    rows = Rows(start_B, *ends, seed_B, cache)
    sampling = Sampling(temperature)
    return decode_steps(model, rows, count=length, sampling=sampling)[1]
