"""What decoders do with their features: logits, the loss, and the next token.

Shape suffixes: B batch, T time, D model width, V vocabulary.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jshard
from jshard.inference.generation import head_product
from jshard.nn import with_all_columns


class Features(NamedTuple):
    """What the head is applied to, and what came with it.

    Attributes:
      x_BTD: normalised features.
      head_DV: the head, with the columns of this device if they are split.
      soft_cap: c in ``c tanh(logit / c)``, if logits have one.
      penalty: what is added to the loss.
      cache: what ``init_cache`` returns, with all tokens so far, when decoding.
    """

    x_BTD: jax.Array
    head_DV: jax.Array
    soft_cap: float | None = None
    penalty: jshard.Mean | jshard.Loss | None = None
    cache: Any = None


class Decoder(nnx.Module):
    """Tokens to logits; ``loss`` for training, without the logits of a whole batch.

    A model defines ``features`` and ``init_cache``, and has a ``config`` with
    ``loss_chunk``, ``label_smoothing`` and ``z_loss``.
    """

    config: Any
    splits_sequences = True  # positions and attention know of it

    @property
    def tensor_split(self) -> jshard.nn.Split | None:
        """The head's columns, unless they are the table's rows."""
        return jshard.nn.Split(vocabulary=("head",)) if hasattr(self, "head") else None

    def features(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: Any = None,
        weights_BT: jax.Array | None = None,
    ) -> Features:
        """Returns what the head is applied to; with a cache, for ``decode``.

        The weights of targets tell a router which tokens are padding.
        """
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache for ``batch`` rows of up to ``length`` tokens."""
        raise NotImplementedError

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        weights_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits (B, T, V) in float32 or wider.

        Args:
          tokens_BT: tokens.
          positions_BT: their positions, by default 0 to T-1 in each row.
          segment_ids_BT: which document of a packed row each token belongs to; tokens
            attend only to their own document, a run of equal ids.
          weights_BT: those of their targets, 0 for padding, which routers leave out of
            their corrections.

        Raises:
          AssertionError: shapes do not match.
        """
        packed = positions_BT, segment_ids_BT
        check_tokens(tokens_BT, *packed, weights_BT)
        out = self.features(tokens_BT, *packed, weights_BT=weights_BT)
        return _logits(out, self.config.vocab_size)

    def loss(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jshard.Mean | jshard.Loss:
        """Returns the cross-entropy in nats, a Mean weighted by ``weights_BT``.

        Smoothing of labels and z-loss are the config's. A model's penalty is added, if
        it has one. Arguments and errors are as for ``__call__``.
        """
        check_tokens(tokens_BT, positions_BT, segment_ids_BT)
        packed = positions_BT, segment_ids_BT
        out = self.features(tokens_BT, *packed, weights_BT=weights_BT)
        cross_entropy = jshard.nn.cross_entropy(
            out.x_BTD,
            out.head_DV,
            targets_BT,
            weights_BT,
            chunk=self.config.loss_chunk,
            soft_cap=out.soft_cap,
            vocabulary=self.config.vocab_size,
            label_smoothing=self.config.label_smoothing,
            z_loss=self.config.z_loss,
        )
        return cross_entropy if out.penalty is None else cross_entropy + out.penalty

    def log_probs(
        self,
        tokens_BT: jax.Array,
        targets_BT: jax.Array,
        weights_BT: jax.Array | None = None,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jshard.Mean | jshard.Loss | None]:
        """Returns log-probabilities of targets (B, T), and the penalty if there is one.

        Arguments and errors are as for ``loss``. The weights, 0 for padding, are those
        of the penalty; without them all tokens are in it.
        """
        check_tokens(tokens_BT, targets_BT, positions_BT, segment_ids_BT)
        packed = positions_BT, segment_ids_BT
        out = self.features(tokens_BT, *packed, weights_BT=weights_BT)
        log_probs_BT = jshard.nn.token_log_probs(
            out.x_BTD,
            out.head_DV,
            targets_BT,
            chunk=self.config.loss_chunk,
            soft_cap=out.soft_cap,
            vocabulary=self.config.vocab_size,
        )
        return log_probs_BT, out.penalty

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the logits of new tokens, (B, T, V), and the cache with them.

        Args:
          tokens_BT: tokens that follow those in the cache.
          positions_BT: their positions; -1 for padding, which is written nowhere.
          cache: from ``init_cache`` or an earlier call.
        """
        out = self.features(tokens_BT, positions_BT, cache=cache)
        assert out.cache is not None
        return _logits(out, self.config.vocab_size, head_product(self)), out.cache


def check_tokens(tokens_BT: jax.Array, *beside: jax.Array | None) -> None:
    """Asserts that tokens are a matrix, and what is given beside them is like it."""
    chex.assert_rank(tokens_BT, 2)
    chex.assert_equal_shape([tokens_BT, *(x for x in beside if x is not None)])


def _logits(out: Features, vocab_size: int, dot: Any = lax.dot_general) -> jax.Array:
    wide = jnp.promote_types(out.x_BTD.dtype, jnp.float32)
    head_DV = out.head_DV.astype(out.x_BTD.dtype)

    def product(x_BTD: jax.Array) -> jax.Array:
        dimensions = ((x_BTD.ndim - 1,), (0,)), ((), ())
        return dot(x_BTD, head_DV, dimensions, preferred_element_type=wide)

    if head_DV.shape[1] == vocab_size:
        logits_BTV = product(out.x_BTD)
    else:
        logits_BTV = with_all_columns(product, out.x_BTD)[..., :vocab_size]
    if out.soft_cap is None:
        return logits_BTV
    return out.soft_cap * jnp.tanh(logits_BTV / out.soft_cap)
