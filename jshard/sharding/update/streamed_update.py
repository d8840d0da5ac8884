"""Streams arrays in host memory through an update, a layer at a time.

The update is called with a part of the arrays, all others masked: with one layer of a
Stack, in a scan over its layers, or with one parameter outside Stacks. That this is the
update of all is asked beforehand (``stacks/layers_alone.py``).

Each iteration of the scan fetches layer l while the results of layer l - 1 leave. Of
two arrays of about the same size, the first is fetched while the results of the second
leave, then the second is fetched while those of the first leave, so that both
directions of the bus are busy. What is fetched takes the memory of what has left: two
layers are in device memory. Parameters outside Stacks are updated one after another,
with two on the device at a time.

Barriers fix the order within an array (slice, then update the slice); without them XLA
would copy it. XLA makes a slice or an update a single transfer only if the slice goes
straight to the device and the update comes straight from there.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jshard.sharding.layout.memory_kinds import on_device, on_host
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.scopes import within
from jshard.sharding.update.per_layer import PerLayerState, first_layer, stack_name
from jshard.system.errors import UserError

Arrays = list[jax.Array]
Some = dict[int, jax.Array]  # arrays by their position in (state, given)


def streamed_update(
    update: Callable[[Any, Any], Any],
    state: Any,
    given: Any,
    params: Any,
    *,
    separate: bool,
    at_a_time: int = 1,
) -> Any:
    """Computes ``update(state, given)``, streaming the state's host arrays through it.

    For global arrays, under ``jit``. ``update`` returns a tree like ``state``, of the
    same shapes and dtypes, treats the layers of Stacks independently, and takes masked
    arrays (``optax.MaskedNode``). Results stay where arrays of ``state`` are; those of
    ``given`` are on the device.

    Parameters outside Stacks are updated one by one if they are ``separate``; otherwise
    all of their state is on the device at once. Of a Stack so many layers ``at_a_time``
    are.

    Raises:
      UserError: that number does not divide the layers of a Stack.
    """
    leaves, tree = jax.tree.flatten((state, given))
    of_state = jax.tree.structure(state)
    stacks, homes = homes_of(params, (state, given))
    shared = {i: x for i, x in enumerate(leaves) if homes[i] is None}
    if not separate:
        homes = [home if home in stacks else None for home in homes]
    hosted = {home for home, x in zip(homes, leaves, strict=True) if on_host(x)}
    homes = [home if home in hosted else None for home in homes]

    def run(some: Some) -> Some:
        """Updates some arrays of the state, and masks all that is not given."""
        values = {**shared, **some}
        masked = [values.get(i, optax.MaskedNode()) for i in range(len(leaves))]
        new = of_state.flatten_up_to(update(*tree.unflatten(masked)))
        return {i: new[i] for i in some if i < len(new)}

    results: Some = {}
    sent: list[Some] = [{}, {}]  # what each group sent to the host
    others = sorted({*homes} - stacks, key=lambda home: (home is None, str(home)))
    for home in [*sorted(stacks.intersection(homes)), *others]:
        group = {i: x for i, x in enumerate(leaves) if homes[i] == home}
        # Nothing is fetched before the gradients exist, and two groups are on the
        # device at a time.
        if home in hosted:
            group, _ = lax.optimization_barrier((group, sent[-2]))
        if home in stacks:
            layers = next(iter(group.values())).shape[0]
            if layers % at_a_time:
                raise UserError(
                    f"policy.offload_layers={at_a_time}: the Stack {home!r} has "
                    f"{layers} layers, which it must divide"
                )
            made = _update_stack(run, group, of_state.num_leaves, at_a_time)
        else:
            made = run({i: on_device(x) for i, x in group.items()})
            made = {i: _to_host(x) if on_host(group[i]) else x for i, x in made.items()}
        sent.append({i: x for i, x in made.items() if on_host(x)})
        results |= made
    return of_state.unflatten([results[i] for i in range(of_state.num_leaves)])


def homes_of(params: Any, arrays: Any) -> tuple[set[str], list[str | None]]:
    """Returns the Stacks, and the Stack or the parameter that each array belongs to.

    An array belongs to the parameter whose path its own ends with. Counts and schedules
    have None, but those that ``per_layer`` keeps for each layer.
    """
    keystr, leaves_of = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
    stacks: set[str] = set()
    by_name: dict[str, str] = {}
    for path, variable in leaves_of(params, is_leaf=is_variable):
        stack = stack_name(path, variable)
        stacks |= set() if stack is None else {stack}
        home = stack or keystr(path, simple=True, separator=".")
        for inner, _ in leaves_of(variable):
            by_name[keystr((*path, *inner))] = home

    def homes(tree: Any) -> Iterator[str | None]:
        for path, x in leaves_of(tree, is_leaf=lambda x: isinstance(x, PerLayerState)):
            if isinstance(x, PerLayerState):
                yield from homes(x.rest)
                for name in sorted(x.stacked):  # as a tree's leaves are
                    yield from [name] * len(jax.tree.leaves(x.stacked[name]))
            else:
                ends = (keystr(path[i:]) for i in range(len(path)))
                yield next((by_name[end] for end in ends if end in by_name), None)

    return stacks, list(homes(arrays))


def _update_stack(
    run: Callable[[Some], Some], group: Some, number: int, at_a_time: int
) -> Some:
    """Updates some layers of a Stack at a time; of it the arrays before ``number``."""
    hosts = {i: x for i, x in group.items() if on_host(x)}
    stacks = {i: x for i, x in group.items() if i < number and i not in hosts}
    read = {i: x for i, x in group.items() if i >= number}

    def one_layer(index: Any, fetched: list, written: list) -> tuple[list, list]:
        now = dict(zip(stacks, written, strict=True))
        layers = {i: _part(x, index, at_a_time) for i, x in (now | read).items()}
        with within(first_layer, index * at_a_time):
            made = run(layers | dict(zip(hosts, fetched, strict=True)))
        written = [_with_part(now[i], made[i], index) for i in stacks]
        return [made[i] for i in hosts], written

    of_hosts, of_device = list(hosts.values()), list(stacks.values())
    arrays = _stream_layers(one_layer, of_hosts, of_device, at_a_time)
    return dict(zip([*hosts, *stacks], [*arrays[0], *arrays[1]], strict=True))


def _part(x: jax.Array, index: Any, size: int) -> jax.Array:
    """Returns so many layers, of all parts of that size."""
    return lax.dynamic_slice_in_dim(x, index * size, size)


def _with_part(x: jax.Array, part: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, index * len(part), 0)


def _to_host(x: jax.Array) -> jax.Array:
    """Moves a traced array to host memory, if it is not there already."""
    return x if on_host(x) else jax.device_put(x, jax.memory.Space.Host)


def _stream_layers(
    fn: Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays]],
    hosts: Sequence[jax.Array],
    stacks: Arrays,
    at_a_time: int,
) -> tuple[Arrays, Arrays]:
    """Applies ``fn`` to one part after another of arrays in host memory, (L, ...).

    ``fn(index, fetched, stacks)`` returns results and stacks. ``fetched`` and results
    hold part ``index`` of each host array, so many layers; ``stacks`` are arrays on the
    device that are passed from part to part. Returns ``hosts`` and ``stacks`` after
    the last part.
    """
    length = hosts[0].shape[0] // at_a_time
    order = sorted(range(len(hosts)), key=lambda i: -hosts[i].nbytes)
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]

    def fetch(x: jax.Array, index: Any) -> jax.Array:
        return on_device(_part(x, index, at_a_time))

    def store(x: jax.Array, part: jax.Array, index: Any) -> jax.Array:
        return _with_part(x, _to_host(part), index)

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
