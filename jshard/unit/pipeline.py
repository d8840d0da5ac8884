"""Loops over the layers of a Stack, one after the other or with prefetch.

With prefetch an iteration gathers the weights of the layer that comes next and
scatters the gradients of the one before, neither of which its own layer needs: both
run beside it. The first layers of a backward, which have no gradients to put away, and
the last of either direction, which has none to gather for, are outside the loop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.layout.placement import Placement


@dataclasses.dataclass(frozen=True)
class Layers:
    """The shards of neighbouring layers, (L, ...) each of a whole Stack.

    Attributes:
      shards: local shards.
      places: their placements.
      start: the first layer.
      stop: the layer after the last.
    """

    shards: Sequence[jax.Array]
    places: Sequence[Placement]
    start: int
    stop: int

    def here(self, index: Any) -> list[jax.Array]:
        """One layer's shards, on the device."""
        return [
            place.fetched(x)
            for x, place in zip(layer_of(self.shards, index), self.places, strict=True)
        ]

    def in_turn(
        self, body: Callable, carry: Any, xs: Any, *, reverse: bool = False
    ) -> tuple[Any, Any]:
        """``lax.scan`` of ``body(index, here, carry, slices)`` over these layers.

        ``here`` are a layer's shards, on the device: those that wait in host memory are
        fetched while the layer before runs.
        """
        hosted = [place.hosted for place in self.places]
        length = self.stop - self.start

        def fetch(index: jax.Array) -> list[Any]:
            away = [x for x, h in zip(self.shards, hosted, strict=True) if h]
            layer = layer_of(away, index)
            return [jax.device_put(x, jax.memory.Space.Device) for x in layer]

        def step(state, slices):
            index, fetched, carry = state
            following = index + (-1 if reverse else 1)
            near = jnp.clip(following, self.start, self.stop - 1)
            arriving = fetched if length == 1 else fetch(near)
            arrived = iter(fetched)
            here = [
                next(arrived) if h else layer_of([x], index)[0]
                for x, h in zip(self.shards, hosted, strict=True)
            ]
            carry, ys = body(index, here, carry, slices)
            return (following, arriving, carry), ys

        first = jnp.int32(self.stop - 1 if reverse else self.start)
        state = (first, fetch(first), carry)
        (_, _, carry), ys = lax.scan(step, state, xs, length=length, reverse=reverse)
        return carry, ys

    def forward_ahead(
        self, load: Callable, body: Callable, last: Callable, carry: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Each layer while the weights of the next are loaded; at least two layers.

        Args:
          load: ``load(index, carry)`` gives the weights of a layer, and the carry.
          body: ``body(index, weights, carry)`` gives a carry and ys.
          last: the same for the last layer, which is outside the loop.
          carry: enters the first layer.

        Returns:
          The carry, ys of the layers but the last stacked, those of the last, and its
          weights.
        """

        def step(state, _):
            index, weights, carry = state
            arriving, carry = load(index + 1, carry)
            carry, ys = body(index, weights, carry)
            return (index + 1, arriving, carry), ys

        weights, carry = load(self.start, carry)
        state = (jnp.int32(self.start), weights, carry)
        length = self.stop - self.start - 1
        (_, weights, carry), ys = lax.scan(step, state, None, length=length)
        carry, last_ys = last(self.stop - 1, weights, carry)
        return carry, ys, last_ys, weights

    def backward_ahead(
        self,
        load: Callable,
        body: Callable,
        alone: Callable,
        scatter: Callable,
        put: Callable,
        weights: Any,
        carry: Any,
        *,
        late: bool,
    ) -> Any:
        """The layers in reverse, each between its neighbours' transfers; at least two.

        Args:
          load: ``load(index, carry)`` gives the weights of a layer, and the carry.
          body: ``body(index, weights, carry)`` gives a carry and whole gradients.
          alone: the same for the layers outside the loop.
          scatter: ``scatter(grads, following, carry)`` gives shards of gradients, and
            what is not there before them: the gradients of the layer and the carry.
          put: ``put(index, parts, carry)`` puts those shards away, in the carry.
          weights: of the last layer.
          carry: enters the last layer.
          late: whether shards are put away beside one layer more: they are summed over
            copies, which takes time as well.
        """

        def turn(layer, index, weights, grads, parts, carry):
            arriving = None
            if not isinstance(index, int) or index > self.start:
                arriving, carry = load(index - 1, carry)
            carry, own = layer(index, weights, carry)
            if parts is not None:
                carry, parts = put(index + 2, parts, carry), None
            if grads is not None:
                parts, own, carry = scatter(grads, own, carry)
            if parts is not None and not late:
                carry, parts = put(index + 1, parts, carry), None
            return arriving, own, parts, carry

        def step(state, _):
            index, weights, grads, parts, carry = state
            return (index - 1, *turn(body, index, weights, grads, parts, carry)), None

        index = self.stop - 1
        grads = parts = None
        # Outside of the loop until there is all that it carries.
        for _ in range(min(2 if late else 1, index - self.start)):
            weights, grads, parts, carry = turn(
                alone, index, weights, grads, parts, carry
            )
            index -= 1
        state = (jnp.int32(index), weights, grads, parts, carry)
        if index > self.start:
            state, _ = lax.scan(step, state, None, length=index - self.start)
        _, grads, parts, carry = turn(alone, self.start, *state[1:])
        if parts is not None:
            carry = put(self.start + 1, parts, carry)
        parts, _, carry = scatter(grads, None, carry)
        return put(self.start, parts, carry)


def layer_of(stacked: Sequence[jax.Array], index: Any) -> list[jax.Array]:
    """One layer's part of (L, ...) arrays."""
    return [
        lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)
        for x in stacked
    ]


def put_layer(stacked: Sequence[Any], layer: Sequence[Any], index: Any) -> list[Any]:
    """(L, ...) arrays with one layer replaced; None where there is none."""
    return [
        None
        if x is None
        else lax.dynamic_update_index_in_dim(
            x, y, index, 0, allow_negative_indices=False
        )
        for x, y in zip(stacked, layer, strict=True)
    ]
