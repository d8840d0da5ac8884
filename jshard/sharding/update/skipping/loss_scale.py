"""Dynamic loss scaling, for computation in float16.

The backward starts from ``scale`` times its seed, and gradients are divided by the
scale in float32. A step whose gradients are not finite changes only the scale
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
"""

import jax
import jax.numpy as jnp

from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import LossScale

LARGEST = 2.0**24


def start(policy: Policy) -> LossScale:
    """Returns what the first step has."""
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.float32(policy.loss_scale_start), zero, zero, zero)


def update(
    loss_scale: LossScale, finite: jax.Array, window: int, hysteresis: int = 1
) -> LossScale:
    """Halves the scale after a step that overflows; doubles it after ``window`` not.

    The first ``hysteresis - 1`` overflows since it was doubled change nothing.
    """
    grows = loss_scale.good_steps + 1 >= window
    grown = jnp.where(grows, loss_scale.scale * 2, loss_scale.scale)
    borne = loss_scale.borne
    bears = borne < hysteresis - 1
    fallen = jnp.where(bears, loss_scale.scale, loss_scale.scale / 2)
    return LossScale(
        jnp.clip(jnp.where(finite, grown, fallen), 1, LARGEST),
        jnp.where(finite & ~grows, loss_scale.good_steps + 1, 0),
        loss_scale.skipped + ~finite,
        jnp.where(finite, jnp.where(grows, 0, borne), borne + bears),
    )
