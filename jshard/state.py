"""TrainState: everything a step reads and writes, one pytree."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The state of a dynamic loss scale.

    Attributes:
      scale: float32 scalar, a power of two.
      good_steps: int32 scalar, since the scale last changed.
      skipped: int32 scalar, steps that were skipped in all.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array


class ModelArrays(NamedTuple):
    """The arrays that a model is made of: whole ones, or one device's part of them.

    Attributes:
      params: what is trained.
      frozen: the other parameters.
      model_state: batch statistics, random streams, and the like; replicated.
    """

    params: nnx.State
    frozen: nnx.State
    model_state: nnx.State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training; its arrays are sharded, its structure is static.

    Attributes:
      step: int32 scalar, updates made so far.
      params: what is trained (selected by ``wrt``), an ``nnx.State``.
      frozen: the other parameters; sharded and gathered, never changed.
      model_state: batch statistics, random streams, and the like.
      opt_state: the optimizer's state, sharded like the parameters it follows.
      graphdef: the model's structure.
      ema: averages of ``params`` (``Policy.ema_decay``), sharded like them, in float32
        or more; None where there are none.
      loss_scale: the dynamic scale of the loss (``Policy.loss_scale``), or None.
    """

    step: jax.Array
    params: nnx.State
    frozen: nnx.State
    model_state: nnx.State
    opt_state: Any
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    ema: nnx.State | None = None
    loss_scale: LossScale | None = None

    @property
    def model_arrays(self) -> ModelArrays:
        """What ``graphdef`` makes the model of."""
        return ModelArrays(self.params, self.frozen, self.model_state)

    def with_ema_params(self) -> "TrainState":
        """This state with the averages as its parameters, in the parameters' dtypes.

        For evaluation, prediction and export; the compiled steps of this state serve
        it, too. Frozen parameters and model state are those of this state.

        Raises:
          UserError: the state has no averages.
        """
        if self.ema is None:
            raise UserError(
                "the state has no averages of its parameters; "
                "train with jshard.Policy(ema_decay=...)"
            )

        # Copies: a step that donates one buffer twice crashes.
        def copy(average: jax.Array, param: jax.Array) -> jax.Array:
            # Either may be in host memory.
            here = jax.device_put(average, jax.memory.Space.Device)
            new = jnp.array(here, param.dtype, copy=True)
            return jax.device_put(new, jax.typeof(param).memory_space)

        params = jax.tree.map(copy, self.ema, self.params)
        return dataclasses.replace(self, params=params)
