"""TrainState: everything a step reads and writes, one pytree."""

import dataclasses
from typing import Any

import jax
from flax import nnx


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
    """

    step: jax.Array
    params: nnx.State
    frozen: nnx.State
    model_state: nnx.State
    opt_state: Any
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
