"""Max: a metric that is the largest value, where a Mean would be an average."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """The largest value of a metric over devices, micro-batches and batches.

    For the metrics of a loss function: ``{"largest": jshard.nn.Max(jnp.max(error))}``.
    Examples of weight 0 are left out by ``jnp.max(error, where=weights > 0,
    initial=0.0)``. For a minimum, take the negative.

    Attributes:
      value: scalar, the largest of this device's examples.
    """

    value: Any

    def compute(self) -> Any:
        """Returns the value; -inf of no examples."""
        return self.value

    def larger(self, other: "Max") -> "Max":
        """Returns the larger of two."""
        return Max(jnp.maximum(self.value, other.value))

    def over(self, axes: Any) -> "Max":
        """Returns the largest over the devices of mesh axes."""
        return Max(lax.pmax(self.value, axes))


def is_max(x: Any) -> bool:
    """Returns whether something is a Max."""
    return isinstance(x, Max)


def before_all(tree: Any) -> Any:
    """Returns zeros like a tree of arrays, to add to; a Max begins as the least."""

    def begin(x: Any) -> Any:
        if is_max(x):
            return Max(jnp.full_like(x.value, -jnp.inf))
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(begin, tree, is_leaf=is_max)


def combined(add: Callable[..., Any], pick: Callable[..., Max], *trees: Any) -> Any:
    """Combines arrays of several trees by ``add``, and each Max by ``pick``."""
    choose = lambda x, *more: (pick if is_max(x) else add)(x, *more)
    return jax.tree.map(choose, *trees, is_leaf=is_max)
