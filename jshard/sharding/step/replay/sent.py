"""Hashes what each device sends to others in a step, in the order of the program.

A device that computes something wrong is the first that sends something wrong: what
others compute from it comes later. Sums hide who was it, so the hash is taken before
them. A step is traced, and evaluated again with a hash of the operands of each
collective, inside of loops, too; the values themselves stay as they are.
"""

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hashes:
    """What has hashes, and these, one after the other.

    Attributes:
      events: static, in the order of words.
      words: uint32 (devices, words); of one event, within a device, (*its shape, 2).
    """

    events: tuple[Event, ...] = dataclasses.field(metadata={"static": True})
    words: jax.Array

    def within(self, *around: int | Loop) -> "Hashes":
        """Returns them with the place where they are, or the loop, put before."""
        events = [e._replace(path=(*around, *e.path)) for e in self.events]
        return Hashes(tuple(events), self.words)


def recorded(
    step: Callable[..., Any], gradients: Sequence[Result]
) -> Callable[..., Any]:
    """Returns a step that also returns ``Hashes``.

    Args:
      step: a jitted ``step(state, batch)``.
      gradients: what its devices return first.
    """

    def run(*args: Any) -> tuple[Any, Hashes]:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        results, found = _outside(closed, jax.tree.leaves(args), gradients)
        words = jnp.concatenate([part.words for part in found], axis=1)
        hashes = Hashes(_events(found), words)
        return jax.tree.unflatten(jax.tree.structure(shapes), results), hashes

    return run


def _events(found: Sequence[Hashes]) -> tuple[Event, ...]:
    return tuple(event for part in found for event in part.events)


def _outside(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], gradients: Sequence[Result]
) -> tuple[list[Any], list[Hashes]]:
    """Runs a program of global arrays; returns hashes of each ``shard_map`` in it."""
    env, found = jaxprs.environment(closed, inputs), []
    for place, eqn in enumerate(closed.jaxpr.eqns):
        values = jaxprs.read(env, eqn.invars)
        with jaxprs.context(eqn):
            if eqn.primitive.name == "shard_map":
                results, hashes = _on_devices(eqn, values, gradients)
                here = [hashes]
            elif eqn.primitive.name in jaxprs.CALLS and jaxprs.has(eqn, {"shard_map"}):
                results, here = _outside(jaxprs.inner_jaxpr(eqn), values, gradients)
            else:
                results, here = jaxprs.bind(eqn, values), []
        found += [part.within(place) for part in here]
        env.update(zip(eqn.outvars, results, strict=True))
    return jaxprs.read(env, closed.jaxpr.outvars), found


def _on_devices(
    eqn: Any, values: Sequence[Any], gradients: Sequence[Result]
) -> tuple[list[Any], Hashes]:
    params, mesh = eqn.params, eqn.params["mesh"]
    inner = core.ClosedJaxpr(params["jaxpr"], ())
    shapes = [tuple(v.aval.shape) for v in eqn.outvars[: len(gradients)]]
    has_gradients = shapes == [result.shape for result in gradients]

    def local(*inputs: Any) -> tuple[list[Any], Hashes]:
        results, hashed = _inside(inner, inputs, dict(mesh.shape))
        last = len(inner.jaxpr.eqns)
        returned = results[: len(gradients)] if has_gradients else []
        for wanted, x in zip(gradients, returned, strict=has_gradients):
            layers = tuple(x.shape[: wanted.layers])
            event = Event("gradient", wanted.name, (last,), layers)
            words = hash_bits(lax.optimization_barrier(x), len(layers))
            hashed.append(Hashes((event,), words))
        return results, Hashes(_events(hashed), joined([x.words for x in hashed]))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(mesh.axis_names)),
        axis_names=params["newly_manual_axes"],
        check_vma=False,
    )
    return mapped(*values)


# One device, inside shard_map.


def _inside(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashes]]:
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
        hashed += [part.within(place) for part in here]
        env.update(zip(eqn.outvars, results, strict=True))
    return jaxprs.read(env, closed.jaxpr.outvars), hashed


def _is_sent(eqn: Any, sizes: dict[Any, int]) -> bool:
    """Returns whether a collective is of more than one device."""
    return math.prod(sizes.get(axis, 1) for axis in jaxprs.axes_of(eqn)) > 1


def _hashes(eqn: Any, values: Sequence[Any]) -> list[Hashes]:
    name = eqn.primitive.name
    name = _NAMES.get(name) or name.replace("_", "-")
    scopes = jaxprs.scopes_of(eqn)
    event = Event("sent", f"{name} ({scopes})" if scopes else name)
    return [Hashes((event,), hash_bits(jnp.asarray(x))) for x in values]


def _remat(
    eqn: Any, values: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashes]]:
    """Rebuilds a ``jax.checkpoint``, so that XLA does not merge it with its forward."""

    def run(*inputs: Any) -> tuple[list[Any], list[Hashes]]:
        return _inside(jaxprs.inner_jaxpr(eqn), inputs, sizes)

    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
    inner = jaxprs.consts_as_inputs(traced, values, traced.consts)
    inputs, params = [*values, *traced.consts], eqn.params | {"jaxpr": inner}
    results = eqn.primitive.bind(*inputs, **params)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _scan(
    eqn: Any, values: Sequence[Any], sizes: dict[Any, int]
) -> tuple[list[Any], list[Hashes]]:
    params = eqn.params
    num_consts, num_carry = jaxprs.scan_sizes(eqn)
    consts, values = values[:num_consts], values[num_consts:]

    def turn(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        inputs = [*consts, *carry, *slices]
        results, hashed = _inside(params["jaxpr"], inputs, sizes)
        return results[:num_carry], (results[num_carry:], hashed)

    static = {key: params[key] for key in ("length", "reverse", "unroll")}
    first, sliced = list(values[:num_carry]), list(values[num_carry:])
    carry, (ys, hashed) = lax.scan(turn, first, sliced, **static)
    loop = Loop(params["length"], params["reverse"])
    return [*carry, *ys], [part.within(loop) for part in hashed]
