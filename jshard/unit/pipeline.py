"""The algorithm software-pipelined: a layer runs between its neighbours' transfers.

An iteration unshards the weights of the layer that comes next and scatters the
gradients of the one before, neither of which its own layer needs: both run beside it.
The first layers of a backward, which have no gradients to put away, and the last of
either direction, which has none to unshard for, are outside the loop.
"""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from jshard.unit.segments import Segment


class Forward(Protocol):
    """The verbs of a forward pass."""

    def unshard(self, index: Any, carry: Any) -> tuple[Any, Any]:
        """(a layer's weights, the carry), neither there before the other."""
        ...

    def run(self, index: Any, weights: Any, carry: Any) -> tuple[Any, Any]:
        """A layer in the loop: (carry, what is stacked)."""
        ...

    def run_last(self, index: int, weights: Any, carry: Any) -> tuple[Any, Any]:
        """The same for the last layer, outside of the loop."""
        ...


class Backward(Protocol):
    """The verbs of a backward pass, and the sums that it adds up."""

    def unshard_again(self, index: Any, sums: Any) -> tuple[Any, Any]:
        """(the weights that a layer's backward reads, the sums)."""
        ...

    def transpose(self, index: Any, weights: Any, sums: Any) -> tuple[Any, Any]:
        """A layer in the loop: (sums, gradients of whole weights)."""
        ...

    def transpose_alone(self, index: int, weights: Any, sums: Any) -> tuple[Any, Any]:
        """The same outside of the loop."""
        ...

    def transpose_last(
        self, index: int, weights: Any, sums: Any
    ) -> tuple[Any, Any, Any]:
        """The same for the last layer, and what arrives while it runs."""
        ...

    def scatter(self, grads: Any, following: Any, sums: Any) -> tuple[Any, Any, Any]:
        """(parts, following, sums): gradients scattered, before which the others wait.

        ``following`` are the gradients of the layer that runs meanwhile, or None.
        """
        ...

    def put(self, index: Any, parts: Any, sums: Any) -> Any:
        """The sums with a layer's gradients put away."""
        ...


def forward(layers: Forward, segment: Segment, carry: Any) -> tuple[Any, Any, Any, Any]:
    """Runs the layers of a segment, at least two.

    Returns:
      The carry, what is stacked of all layers but the last, that of the last, and the
      weights of the last, with which the backward begins.
    """

    def step(state, _):
        index, weights, carry = state
        arriving, carry = layers.unshard(index + 1, carry)
        carry, ys = layers.run(index, weights, carry)
        return (index + 1, arriving, carry), ys

    weights, carry = layers.unshard(segment.start, carry)
    state = (jnp.int32(segment.start), weights, carry)
    (_, weights, carry), ys = lax.scan(step, state, None, length=segment.length - 1)
    carry, last_ys = layers.run_last(segment.stop - 1, weights, carry)
    return carry, ys, last_ys, weights


def backward(
    layers: Backward, segment: Segment, weights: Any, sums: Any, *, late: bool
) -> tuple[Any, Any]:
    """Transposes the layers of a segment, at least two, in reverse.

    Args:
      layers: the verbs.
      segment: of the layers.
      weights: of the last layer.
      sums: enters the last layer.
      late: whether gradients are put away beside one layer more: they are summed over
        copies, which takes time as well.

    Returns:
      The sums after the first layer, and what arrived while the last ran.
    """
    start = segment.start

    def turn(transpose, index, weights, grads, parts, sums):
        arriving = None
        if not isinstance(index, int) or index > start:
            arriving, sums = layers.unshard_again(index - 1, sums)
        sums, own = transpose(index, weights, sums)
        if parts is not None:
            sums, parts = layers.put(index + 2, parts, sums), None
        if grads is not None:
            parts, own, sums = layers.scatter(grads, own, sums)
        if parts is not None and not late:
            sums, parts = layers.put(index + 1, parts, sums), None
        return arriving, own, parts, sums

    def step(state, _):
        index, weights, grads, parts, sums = state
        own = (weights, grads, parts, sums)
        return (index - 1, *turn(layers.transpose, index, *own)), None

    # Outside of the loop until there is all that it carries.
    index = segment.stop - 2
    arriving, sums = layers.unshard_again(index, sums)
    sums, grads, arrived = layers.transpose_last(index + 1, weights, sums)
    weights, parts = arriving, None
    if late and index > start:
        weights, grads, parts, sums = turn(
            layers.transpose_alone, index, weights, grads, parts, sums
        )
        index -= 1
    state = (jnp.int32(index), weights, grads, parts, sums)
    if index > start:
        state, _ = lax.scan(step, state, None, length=index - start)
    _, grads, parts, sums = turn(layers.transpose_alone, start, *state[1:])
    if parts is not None:
        sums = layers.put(start + 1, parts, sums)
    parts, _, sums = layers.scatter(grads, None, sums)
    return layers.put(start, parts, sums), arrived
