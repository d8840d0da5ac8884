"""Remat for the first layers of a Stack alone, in the one scan over all of them.

The others keep all that their backward reads, so that as much memory as there is buys
back as much recomputation (YaFSDP's number of layers with activation checkpointing).
Both kinds of residuals lie in buffers that the scan carries, with as many places as
there are layers of that kind; a layer's backward is one of two branches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives import vary, varying
from jshard.remat import LinearizedLayer


def linearize_stack(
    linearize: Callable[[Any], LinearizedLayer],
    remat: Any,
    first_k: int | None,
    length: int,
) -> "LinearizedLayer | FirstLayers":
    """Linearizes the layers of a Stack, the first of them alone with ``remat``."""
    if first_k is None or first_k >= length:
        return linearize(remat)
    if first_k == 0:
        return linearize("none")
    return FirstLayers(linearize, remat, first_k, length)


class FirstLayers:
    """A layer whose residuals depend on its index: ``LinearizedLayer`` for a scan.

    Args:
      make: ``make(remat)`` linearizes the layer.
      remat: the policy of the first layers.
      count: how many those are; of the others all residuals are kept.
      length: how many layers there are.
    """

    def __init__(
        self,
        make: Callable[[Any], LinearizedLayer],
        remat: Any,
        count: int,
        length: int,
    ):
        self._first, self._rest = make(remat), make("none")
        self._count, self._length = count, length
        self.consts, self.outputs = self._first.consts, self._first.outputs
        self.call = self._first.call
        read = {*self._first.weights_read, *self._rest.weights_read}
        self.weights_read = sorted(read)

    def buffers(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The empty buffers."""
        return (
            # The last place is for what the other layers would write.
            [_zeros(x, self._count + 1) for x in self._first.kept],
            [_zeros(x, self._length - self._count) for x in self._rest.kept],
        )

    def _places(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A first layer writes to the others' first place, and they write over it.
        first = jnp.minimum(index, self._count)
        return first, jnp.maximum(index - self._count, 0)

    def forward_at(
        self, index: jax.Array, buffers: Any, *inputs: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Outputs, and residuals, all of them in the buffers.

        Both layers are the same computation, which the compiler does once.
        """
        first, rest = self._places(index)
        outputs, kept_first = self._first.forward(*inputs)
        _, kept_rest = self._rest.forward(*inputs)
        buffers = (
            _write(buffers[0], kept_first, first),
            _write(buffers[1], kept_rest, rest),
        )
        return outputs, [], buffers

    def backward_at(
        self, index: jax.Array, buffers: Any, weights, xs, args, kept, cotangents
    ) -> list[list[Any]]:
        """Gradients, as ``LinearizedLayer.backward`` gives them."""
        del kept
        first, rest = self._places(index)

        def branch(layer: LinearizedLayer, buffer: list[jax.Array], place: jax.Array):
            kept = [lax.dynamic_index_in_dim(b, place, keepdims=False) for b in buffer]
            return lambda: layer.backward(weights, xs, args, kept, cotangents)

        return lax.cond(
            index < self._count,
            branch(self._first, buffers[0], first),
            branch(self._rest, buffers[1], rest),
        )


def _zeros(kept: Any, places: int) -> jax.Array:
    return vary(jnp.zeros((places, *kept.shape), kept.dtype), tuple(varying(kept)))


def _write(buffer: list[jax.Array], kept: Sequence[Any], place: jax.Array) -> list:
    return [
        lax.dynamic_update_index_in_dim(b, x, place, 0)
        for b, x in zip(buffer, kept, strict=True)
    ]
