"""The sizes and details of a T5.

Shape suffixes: D model width, N heads, H head width, F hidden width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jshard.models.layers import check


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and details of a T5; the defaults are those of v1.0 small.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: layers of the encoder.
      num_decoder_layers: layers of the decoder.
      num_heads: N.
      head_width: H.
      width: D; N times H may differ from it.
      hidden: F, width of the MLP.
      gated: whether the MLP is GEGLU, as in v1.1, in place of ReLU.
      tied: whether the head is the transposed embedding, with features divided by the
        root of D, as in v1.0.
      buckets: number of classes of relative positions.
      max_distance: positions at least so far apart share the last class.
      norm_eps: added to the mean square in RMSNorm.
      dropout: rate, on embeddings, residual branches and final features.
      loss_chunk: tokens per device whose logits exist at a time in the loss.
      label_smoothing: of the targets of the loss, as in ``jshard.nn.cross_entropy``.
      z_loss: likewise.
      start_token: the decoder's first input token.
      dtype: of the computation; None is that of the parameters, or what a policy says.
      param_dtype: of the parameters.
    """

    vocab_size: int = 32128
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    head_width: int = 64
    width: int = 512
    hidden: int = 2048
    gated: bool = False
    tied: bool = True
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    dropout: float = 0.0
    loss_chunk: int = 1024
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    start_token: int = 0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        # A side has the buckets to itself where it looks in one direction only.
        check(
            0 < self.buckets < self.max_distance and self.buckets % 4 == 0,
            f"buckets={self.buckets} must be a multiple of 4, and max_distance="
            f"{self.max_distance} larger",
        )
