"""Streams stacked arrays through device memory a layer at a time, in both directions.

Each iteration of the loop fetches layer l while the results of layer l - 1 leave. Of
two arrays of about the same size, the first is fetched while the results of the second
leave, then the second is fetched while those of the first leave, so that both
directions of the bus are busy. What is fetched takes the memory of what has left: two
layers are in device memory.

Barriers fix the order within an array (slice, then update the slice); without them XLA
would copy it. XLA makes a slice or an update a single transfer only if the slice goes
straight to the device and the update comes straight from there.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.layout.memory_kinds import on_device, on_host

Arrays = list[jax.Array]


def layer_at(x: jax.Array, index: Any) -> jax.Array:
    """Returns layer ``index`` of (L, ...), as (1, ...)."""
    return lax.dynamic_index_in_dim(x, index, keepdims=True)


def with_layer(x: jax.Array, layer: jax.Array, index: Any) -> jax.Array:
    """Returns (L, ...) with (1, ...) in place of layer ``index``."""
    return lax.dynamic_update_index_in_dim(x, layer, index, 0)


def to_host(x: jax.Array) -> jax.Array:
    """Moves a traced array to host memory, if it is not there already."""
    return x if on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def stream_layers(
    fn: Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays]],
    hosts: Sequence[jax.Array],
    stacks: Arrays,
) -> tuple[Arrays, Arrays]:
    """Applies ``fn`` to one layer after another of arrays in host memory.

    Args:
      fn: ``fn(index, fetched, stacks) -> (results, stacks)``. ``fetched`` and
        ``results`` hold layer ``index`` of each host array, (1, ...).
      hosts: arrays in host memory, (L, ...) each.
      stacks: arrays on the device that are passed from layer to layer.

    Returns:
      ``hosts`` and ``stacks`` after the last layer.
    """
    length = hosts[0].shape[0]
    order = sorted(range(len(hosts)), key=lambda i: -hosts[i].nbytes)
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]

    def fetch(x: jax.Array, index: Any) -> jax.Array:
        return on_device(layer_at(x, index))

    def store(x: jax.Array, layer: jax.Array, index: Any) -> jax.Array:
        return with_layer(x, to_host(layer), index)

    def exchange(index: Any, hosts: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        """Fetches layer ``index`` and stores the results of the one before."""
        slots = [[None, *arrays] for arrays in zip(hosts, results, strict=True)]
        for pair, following in itertools.pairwise([*pairs, []]):
            for i in pair:
                fetched, host, result = slots[i]
                if i == pair[0]:
                    fetched, host = lax.optimization_barrier((fetch(host, index), host))
                host = store(host, result, index - 1)
                if i != pair[0]:
                    fetched = fetch(host, index)
                slots[i] = [fetched, host, result]
            # Without an order among pairs XLA starts many transfers in one direction
            # and waits for them before it starts one in the other.
            together = [*pair, *following]
            passed = lax.optimization_barrier([slots[i] for i in together])
            for i, slot in zip(together, passed, strict=True):
                slots[i] = slot
        return [slot[0] for slot in slots], [slot[1] for slot in slots]

    def body(carry: tuple, index: Any) -> tuple[tuple, None]:
        hosts, results, stacks = carry
        fetched, hosts = exchange(index, hosts, results)
        return (hosts, *fn(index, fetched, stacks)), None

    first = fn(0, [fetch(x, 0) for x in hosts], stacks)
    carry, _ = lax.scan(body, (list(hosts), *first), jnp.arange(1, length))
    hosts, results, stacks = carry
    last = zip(hosts, results, strict=True)
    return [store(x, result, length - 1) for x, result in last], stacks
