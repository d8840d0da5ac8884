"""Hashes what each device sends to others in a step, in the order of the program.

A device that computes something wrong is the first that sends something wrong: what
others compute from it comes later. Sums hide who was it, so the hash is taken before
them. A step is traced, and evaluated again with a hash of the operands of each
collective, inside of loops, too; the values themselves stay as they are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from jshard.sharding.step.replay.bits import hash_bits, joined
from jshard.system.compat import jaxprs

_NAMES = {"psum": "all-reduce", "psum_invariant": "all-reduce"}


class Loop(NamedTuple):
    """A loop around an event."""

    length: int
    reverse: bool


class Event(NamedTuple):
    """Something of which each device has a hash, in each turn of the loops around it.

    Attributes:
      kind: "sent", "gradient", or what else is hashed.
      name: the collective, or the array's name.
      path: its places in the program and in what is inside, and the loops around.
      layers: the leading dimensions of an array that have hashes of their own.
    """

    kind: str
    name: str
    path: tuple[int | Loop, ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the hashes, without their words."""
        loops = [part.length for part in self.path if isinstance(part, Loop)]
        return (*loops, *self.layers)


class Result(NamedTuple):
    """An array that the devices return: its name, shape, and layer dimensions."""

    name: str
    shape: tuple[int, ...]
    layers: int


Hashed = tuple[Event, jax.Array]


def recorded(
    step: Callable[..., Any], gradients: Sequence[Result], events: list[Event]
) -> Callable[..., Any]:
    """Returns a step that also returns the hashes: uint32 (devices, words).

    Args:
      step: a jitted ``step(state, batch)``.
      gradients: what its devices return first.
      events: when the step is traced, it gets what has hashes, in the order of words.
    """

    def run(*args: Any) -> tuple[Any, jax.Array]:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        results, found = _outside(closed, jax.tree.leaves(args), gradients)
        events[:] = [event for part, _ in found for event in part]
        words = jnp.concatenate([words for _, words in found], axis=1)
        return jax.tree.unflatten(jax.tree.structure(shapes), results), words

    return run


def _outside(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], gradients: Sequence[Result]
) -> tuple[list[Any], list[tuple[list[Event], jax.Array]]]:
    """Runs a program of global arrays; returns hashes of each ``shard_map`` in it."""
    env, found = jaxprs.environment(closed, inputs), []
    for place, eqn in enumerate(closed.jaxpr.eqns):
        values = jaxprs.read(env, eqn.invars)
        with jaxprs.context(eqn):
            if eqn.primitive.name == "shard_map":
                results, events, words = _on_devices(eqn, values, gradients)
                here = [([_within(event, place) for event in events], words)]
            elif eqn.primitive.name in jaxprs.CALLS and jaxprs.has(eqn, {"shard_map"}):
                results, parts = _outside(jaxprs.inner_jaxpr(eqn), values, gradients)
                here = [([_within(e, place) for e in part], x) for part, x in parts]
            else:
                results, here = jaxprs.bind(eqn, values), []
        found += here
        env.update(zip(eqn.outvars, results, strict=True))
    return jaxprs.read(env, closed.jaxpr.outvars), found


def _within(event: Event, *around: int | Loop) -> Event:
    return event._replace(path=(*around, *event.path))


def _on_devices(
    eqn: Any, values: Sequence[Any], gradients: Sequence[Result]
) -> tuple[list[Any], list[Event], jax.Array]:
    params, events = eqn.params, []
    mesh = params["mesh"]
    inner = core.ClosedJaxpr(params["jaxpr"], ())
    shapes = [tuple(v.aval.shape) for v in eqn.outvars[: len(gradients)]]
    has_gradients = shapes == [result.shape for result in gradients]

    def local(*inputs: Any) -> tuple[list[Any], jax.Array]:
        results, hashed = _inside(inner, inputs, dict(mesh.shape))
        last = len(inner.jaxpr.eqns)
        returned = results[: len(gradients)] if has_gradients else []
        for wanted, x in zip(gradients, returned, strict=has_gradients):
            layers = tuple(x.shape[: wanted.layers])
            event = Event("gradient", wanted.name, (last,), layers)
            hashed.append((event, hash_bits(lax.optimization_barrier(x), len(layers))))
        events[:] = [event for event, _ in hashed]
        return results, joined([words for _, words in hashed])

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(mesh.axis_names)),
        axis_names=params["newly_manual_axes"],
        check_vma=False,
    )
    results, words = mapped(*values)
    return results, events, words


# One device, inside shard_map.


def _inside(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashed]]:
    """Runs a program of one device's values; ``sizes`` are those of the mesh's axes."""
    env, hashed = jaxprs.environment(closed, inputs), []
    for place, eqn in enumerate(closed.jaxpr.eqns):
        name, values = eqn.primitive.name, jaxprs.read(env, eqn.invars)
        with jaxprs.context(eqn):
            if name in jaxprs.COLLECTIVES and _is_sent(eqn, sizes):
                # So that the hash is of what is sent, rather than computed again.
                values = lax.optimization_barrier(list(map(jnp.asarray, values)))
                results, here = jaxprs.bind(eqn, values), _hashes(eqn, values)
            elif not jaxprs.has(eqn, jaxprs.COLLECTIVES) or name == "shard_map":
                results, here = jaxprs.bind(eqn, values), []
            elif name == "remat2":
                results, here = _remat(eqn, values, sizes)
            elif name in jaxprs.CALLS:
                results, here = _inside(jaxprs.inner_jaxpr(eqn), values, sizes)
            elif name == "scan":
                results, here = _scan(eqn, values, sizes)
            else:  # a branch, or a loop of unknown length: what comes out of it
                results = jaxprs.bind(eqn, values)
                here = _hashes(eqn, results)
        hashed += [(_within(event, place), words) for event, words in here]
        env.update(zip(eqn.outvars, results, strict=True))
    return jaxprs.read(env, closed.jaxpr.outvars), hashed


def _is_sent(eqn: Any, sizes: dict[Any, int]) -> bool:
    """Returns whether a collective is of more than one device."""
    return math.prod(sizes.get(axis, 1) for axis in jaxprs.axes_of(eqn)) > 1


def _hashes(eqn: Any, values: Sequence[Any]) -> list[Hashed]:
    name = eqn.primitive.name
    name = _NAMES.get(name) or name.replace("_", "-")
    scopes = jaxprs.scopes_of(eqn)
    event = Event("sent", f"{name} ({scopes})" if scopes else name)
    return [(event, hash_bits(jnp.asarray(x))) for x in values]


def _remat(
    eqn: Any, values: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashed]]:
    """Rebuilds a ``jax.checkpoint``, so that XLA does not merge it with its forward."""
    events: list[Event] = []

    def run(*inputs: Any) -> list[Any]:
        results, hashed = _inside(jaxprs.inner_jaxpr(eqn), inputs, sizes)
        events[:] = [event for event, _ in hashed]
        return [*results, *(words for _, words in hashed)]

    traced = jax.make_jaxpr(run)(*values)
    inner = jaxprs.consts_as_inputs(traced, values, traced.consts)
    inputs, params = [*values, *traced.consts], eqn.params | {"jaxpr": inner}
    results = eqn.primitive.bind(*inputs, **params)
    split = len(eqn.outvars)
    return results[:split], list(zip(events, results[split:], strict=True))


def _scan(
    eqn: Any, values: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashed]]:
    params, events = eqn.params, []
    num_consts, num_carry = jaxprs.scan_sizes(eqn)
    consts, values = values[:num_consts], values[num_consts:]

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        inputs = [*consts, *carry, *slices]
        results, hashed = _inside(params["jaxpr"], inputs, sizes)
        events[:] = [event for event, _ in hashed]
        return results[:num_carry], (results[num_carry:], [x for _, x in hashed])

    static = {key: params[key] for key in ("length", "reverse", "unroll")}
    first, sliced = list(values[:num_carry]), list(values[num_carry:])
    carry, (ys, words) = lax.scan(turn, first, sliced, **static)
    loop = Loop(params["length"], params["reverse"])
    inside = [_within(event, loop) for event in events]
    return [*carry, *ys], list(zip(inside, words, strict=True))
