"""What the recipes of image classifiers have in common: pixels in, losses out.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

import jshard

# Of ImageNet's pixels, by channel.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalize(images_BHWC: jax.Array) -> jax.Array:
    """Returns uint8 images as float32, with ImageNet's mean 0 and deviation 1."""
    channels = images_BHWC.shape[-1]
    mean, std = (MEAN, STD) if channels == 3 else ((MEAN[1],), (STD[1],))
    x_BHWC = images_BHWC.astype(jnp.float32) / 255
    return (x_BHWC - jnp.asarray(mean)) / jnp.asarray(std)


def classification_loss(
    logits_BK: jax.Array, batch: Mapping[str, jax.Array], top: Sequence[int] = (1,)
) -> tuple[jshard.Mean, dict[str, Any]]:
    """Returns the cross-entropy in nats, and accuracies.

    Args:
      logits_BK: of any floating dtype.
      batch: has "targets", probabilities (B, K), and "weights", (B,).
      top: for each k, the accuracy counts targets among the k largest logits. The
        target of a mixed example is its likeliest class.

    Raises:
      AssertionError: shapes do not match.
    """
    chex.assert_equal_shape([logits_BK, batch["targets"]])
    chex.assert_shape(batch["weights"], logits_BK.shape[:1])
    logits_BK = logits_BK.astype(jnp.promote_types(logits_BK.dtype, jnp.float32))
    targets_BK, weights_B = batch["targets"], batch["weights"]
    loss_B = -jnp.sum(targets_BK * jax.nn.log_softmax(logits_BK), axis=-1)
    label_B = jnp.argmax(targets_BK, axis=-1)
    at_label_B1 = jnp.take_along_axis(logits_BK, label_B[:, None], axis=-1)
    earlier_BK = jnp.arange(logits_BK.shape[-1]) < label_B[:, None]
    before_BK = jnp.where(earlier_BK, logits_BK >= at_label_B1, logits_BK > at_label_B1)
    rank_B = jnp.sum(before_BK, axis=-1)  # of the label, from 0
    count = jnp.sum(weights_B)
    accuracies = {
        "accuracy" if k == 1 else f"top{k}_accuracy": jshard.Mean(
            jnp.sum(weights_B * (rank_B < k)), count
        )
        for k in top
    }
    return jshard.Mean(jnp.sum(weights_B * loss_B), count), accuracies
