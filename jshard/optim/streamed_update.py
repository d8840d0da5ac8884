"""Streams arrays in host memory through an update, a layer at a time.

The update is called with a part of the arrays, all others masked: with one layer of the
Stacks of a length, in a scan over the layers, or with one parameter outside Stacks.
That this is the update of all must be known (``optim/reach.py``, ``per_layer``).

The scan moves data in both directions at once and holds two layers: while the results
of layer l - 1 leave, those of layer l arrive. Parameters outside Stacks are updated one
after another, with two on the device at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from jax import lax

from jshard.layout.memory_kinds import on_device, on_host
from jshard.optim.host_stream import layer_at, stream_layers, to_host, with_layer
from jshard.optim.per_layer import at_layer

Some = dict[int, jax.Array]  # arrays by their position in (state, given)


def streamed_update(
    update: Callable[[Any, Any], Any],
    state: Any,
    given: Any,
    deeper: tuple[Any, Any],
    params: Any,
    *,
    separate: bool,
) -> Any:
    """Computes ``update(state, given)``, streaming the state's host arrays through it.

    For global arrays, under ``jit``.

    Args:
      update: returns a tree like ``state``, of the same shapes and dtypes, and treats
        the layers of Stacks independently. Takes masked arrays
        (``optax.MaskedNode``).
      state: a pytree of arrays, some in host memory; results stay where these are.
      given: the update's other inputs, on the device.
      deeper: abstract (state, given) with another layer in each Stack.
      params: the parameters, by whose paths arrays are found to be theirs.
      separate: whether parameters outside Stacks may be updated one by one. All of
        their state is on the device at once otherwise.
    """
    leaves, tree = jax.tree.flatten((state, given))
    of_state = jax.tree.structure(state)
    homes = list(_homes(params, (state, given), deeper))
    shared = {i: x for i, x in enumerate(leaves) if homes[i] is None}
    if not separate:
        homes = [home if isinstance(home, int) else None for home in homes]
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
    # Stacks, then parameters, then the rest.
    for home in sorted({*homes}, key=lambda x: (x is None, isinstance(x, str), str(x))):
        group = {i: x for i, x in enumerate(leaves) if homes[i] == home}
        # Nothing is fetched before the gradients exist, and two groups are on the
        # device at a time.
        if home in hosted:
            group, _ = lax.optimization_barrier((group, sent[-2]))
        streamed = _update_stacks if isinstance(home, int) else _update_once
        made = streamed(run, group, of_state.num_leaves)
        sent.append({i: x for i, x in made.items() if on_host(x)})
        results |= made
    return of_state.unflatten([results[i] for i in range(of_state.num_leaves)])


def _homes(params: Any, arrays: Any, deeper: Any) -> Iterator[int | str | None]:
    """Yields where each array belongs: the length of its Stack, or its parameter.

    Counts and schedules have None.
    """
    keystr = jax.tree_util.keystr
    names = {keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    for (path, x), other in zip(leaves, jax.tree.leaves(deeper), strict=True):
        ends = (keystr(path[i:]) for i in range(len(path)))
        name = next((end for end in ends if end in names), None)
        yield name if x.shape == other.shape else x.shape[0]


def _update_once(run: Callable[[Some], Some], group: Some, number: int) -> Some:
    """Updates arrays on the device, those before position ``number``."""
    made = run({i: on_device(x) for i, x in group.items()})
    return {i: to_host(x) if on_host(group[i]) else x for i, x in made.items()}


def _update_stacks(run: Callable[[Some], Some], group: Some, number: int) -> Some:
    """Updates Stacks layer by layer, and of them the arrays before ``number``."""
    hosts = {i: x for i, x in group.items() if on_host(x)}
    stacks = {i: x for i, x in group.items() if i < number and i not in hosts}
    read = {i: x for i, x in group.items() if i >= number}

    def one_layer(index: Any, fetched: list, written: list) -> tuple[list, list]:
        now = dict(zip(stacks, written, strict=True))
        layer = {i: layer_at(x, index) for i, x in (now | read).items()}
        with at_layer(index):
            made = run(layer | dict(zip(hosts, fetched, strict=True)))
        written = [with_layer(now[i], made[i], index) for i in stacks]
        return [made[i] for i in hosts], written

    arrays = stream_layers(one_layer, list(hosts.values()), list(stacks.values()))
    return dict(zip([*hosts, *stacks], [*arrays[0], *arrays[1]], strict=True))
