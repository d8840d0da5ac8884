"""Moves stacked arrays through device memory a layer at a time, both ways at once.

A step of the loop has the results of layer l - 1 and fetches layer l. Of two arrays of
about one size the first is fetched while the second's results leave, then the second is
fetched while the first's leave, so that both directions of the bus are busy. What is
fetched has the room of what is gone: two layers are in device memory.

The order within one array is fixed by barriers, without which XLA would copy it: slice,
then update the slice. A slice must go straight to the device, and an update must come
straight from there, for XLA to make each one transfer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jshard.layout.memory_kinds import on_host

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

Arrays = list[Any]  # None where there is none


def layer_at(x: jax.Array, index: Any) -> jax.Array:
    """Layer ``index`` of (L, ...), as (1, ...)."""
    return lax.dynamic_index_in_dim(x, index, keepdims=True)


def with_layer(x: jax.Array, layer: jax.Array, index: Any) -> jax.Array:
    """(L, ...) with (1, ...) in place of layer ``index``."""
    return lax.dynamic_update_index_in_dim(x, layer, index, 0)


def to_device(x: jax.Array) -> jax.Array:
    """``x`` in device memory."""
    return jax.device_put(x, _DEVICE) if on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """``x`` in host memory."""
    return x if on_host(x) else jax.device_put(x, _HOST)


def stream_layers(
    fn: Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays]],
    length: int,
    hosts: Sequence[jax.Array],
    reads: Sequence[bool],
    writes: Sequence[bool],
    stacks: Arrays,
) -> tuple[Arrays, Arrays]:
    """``fn`` of every layer in turn, on arrays in host memory.

    Args:
      fn: ``fn(index, fetched, stacks) -> (leaving, stacks)``: from layer ``index`` of
        those host arrays that are read, (1, ...) each, that of those that are written;
        None in place of the others.
      length: number of layers L.
      hosts: arrays in host memory, (L, ...) each.
      reads: which of them ``fn`` reads.
      writes: which of them it writes.
      stacks: arrays on the device that are passed along.

    Returns:
      ``hosts`` and ``stacks`` after the last layer.
    """
    number = len(hosts)
    order = sorted(
        range(number), key=lambda i: -hosts[i].size * hosts[i].dtype.itemsize
    )
    pairs = [order[i : i + 2] for i in range(0, number, 2)]

    def fetch(x: jax.Array, index: Any) -> jax.Array:
        return to_device(layer_at(x, index))

    def leave(x: jax.Array, layer: jax.Array, index: Any) -> jax.Array:
        return with_layer(x, to_host(layer), index)

    def exchange(index: Any, hosts: Arrays, leaving: Arrays) -> tuple[Arrays, Arrays]:
        """Layer ``index`` arrives, the one before leaves."""
        hosts, leaving = list(hosts), list(leaving)
        fetched: Arrays = [None] * number
        for pair, following in zip(pairs, [*pairs[1:], []], strict=True):
            for turn, i in enumerate(pair):
                if reads[i] and turn == 0:
                    fetched[i], hosts[i] = lax.optimization_barrier(
                        (fetch(hosts[i], index), hosts[i])
                    )
                if writes[i]:
                    hosts[i] = leave(hosts[i], leaving[i], index - 1)
                if reads[i] and turn == 1:
                    fetched[i] = fetch(hosts[i], index)
            # Pairs follow one another: else XLA starts many transfers one way, and
            # waits for them before it starts one the other way.
            together = [*pair, *following]
            pick = lambda arrays, chosen=together: [arrays[i] for i in chosen]
            passed = lax.optimization_barrier(
                list(map(pick, (fetched, hosts, leaving)))
            )
            for arrays, values in zip((fetched, hosts, leaving), passed, strict=True):
                for i, value in zip(together, values, strict=True):
                    arrays[i] = value
        return fetched, hosts

    def body(index: Any, carry: tuple) -> tuple:
        hosts, leaving, stacks = carry
        fetched, hosts = exchange(index, hosts, leaving)
        return (hosts, *fn(index, fetched, stacks))

    first = [
        fetch(x, 0) if read else None for x, read in zip(hosts, reads, strict=True)
    ]
    carry = (list(hosts), *fn(0, first, stacks))
    hosts, leaving, stacks = lax.fori_loop(1, length, body, carry)
    hosts = [
        x if layer is None else leave(x, layer, length - 1)
        for x, layer in zip(hosts, leaving, strict=True)
    ]
    return hosts, stacks
