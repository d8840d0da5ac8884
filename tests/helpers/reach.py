"""Places that a module can have in a model, and ways that code reaches its weights."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jshard
from zoo_layers import Dense, Residual, make_stack

# Places.


class Opaque(nnx.Module, pytree=False):
    """No pytree, so plain containers may hold its modules."""

    def __init__(self, rngs):
        self.dense = Dense(rngs)
        self.more = [Dense(rngs), {"a": Residual(rngs)}]
        self.pair = (Residual(rngs), "tanh")

    def __call__(self, x):
        return self.pair[0](self.more[1]["a"](self.more[0](self.dense(x))))


class Holder(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.own = Opaque(rngs), Dense(rngs)

    def __call__(self, x):
        return self.own(self.inner(x))


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.own = jshard.Unit(Dense(rngs)), Dense(rngs)

    def __call__(self, x):
        return self.own(self.inner(x))


class OpaqueNested(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.inner, self.own = [jshard.Unit(Opaque(rngs))], Dense(rngs)

    def __call__(self, x):
        return self.own(self.inner[0](x))


class Shared(nnx.Module):
    """One kernel in two Units, one of which is also reached by another name."""

    def __init__(self, rngs):
        self.one, self.two = jshard.Unit(Dense(rngs)), jshard.Unit(Dense(rngs))
        self.two.kernel = self.one.kernel
        self.alias = self.two

    def __call__(self, x):
        return self.alias(jnp.sin(self.one(x)))


class Containers(nnx.Module):
    def __init__(self, rngs):
        inner = nnx.Dict(a=jshard.Unit(Opaque(rngs)))
        self.all: Any = nnx.List([jshard.Unit(Dense(rngs)), inner])

    def __call__(self, x):
        return self.all[1]["a"](self.all[0](x))


class ByVmap(nnx.Module):
    """Layers that Flax stacked and runs; there are as many as devices."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=8)
        @nnx.vmap
        def make(rngs):
            return Residual(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


PLACES: dict[str, Callable] = {
    "root": Dense,
    "unit": lambda rngs: jshard.Unit(Dense(rngs)),
    "by type": Residual,
    "opaque root": Opaque,
    "opaque unit": lambda rngs: jshard.Unit(Opaque(rngs)),
    "unit of opaque": lambda rngs: jshard.Unit(Holder(rngs)),
    "nested unit": lambda rngs: jshard.Unit(Nested(rngs)),
    "unit in opaque root": OpaqueNested,
    "unit in opaque unit": lambda rngs: jshard.Unit(OpaqueNested(rngs)),
    "stack": functools.partial(make_stack, Residual),
    "opaque stack": functools.partial(make_stack, Opaque),
    "unit in stack": functools.partial(make_stack, Nested),
    "unit in opaque stack": functools.partial(make_stack, OpaqueNested),
    "stacked by vmap": ByVmap,
    "shared": Shared,
    "containers": Containers,
}


# Ways.


def params(module: Any) -> list[Any]:
    return [v for _, v in nnx.to_flat_state(nnx.state(module, nnx.Param))]


def squares(values: Any) -> Any:
    return sum(jnp.sum(jnp.asarray(value) ** 2) for value in values)


def leaves(module, x):
    return squares(jax.tree.leaves(nnx.state(module, nnx.Param)))


def mapped(module, x):
    doubled = jax.tree.map(lambda p: 2 * p, nnx.state(module, nnx.Param))
    return squares(jax.tree.leaves(doubled))


def values(module, x):
    return squares(v.get_value() for v in params(module))


def indexed(module, x):
    return squares(v[...] for v in params(module)) + squares(
        v[0] for v in params(module)
    )


def raw(module, x):
    return squares(v.get_raw_value() for v in params(module))


def graph(module, x):
    found = (v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Param))
    return squares(found)


def pure(module, x):
    return squares(jax.tree.leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param))))


def operators(module, x):
    return sum(
        jnp.sum(v * 2 + 1 - (-v) / 3 + v.T.sum() ** 2 + jnp.vdot(v, v))
        for v in params(module)
    )


def shapes(module, x):
    numbers = [(v.size, v.ndim, len(v), *v.shape) for v in params(module)]
    return jnp.asarray(sum(map(sum, numbers)), float)


def by_path(module, x):
    found = jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.Param))
    kernels = [v for path, v in found if path[-2] == jax.tree_util.DictKey("kernel")]
    assert kernels
    return squares(kernels)


def optax_norm(module, x):
    return optax.tree.norm(nnx.state(module, nnx.Param))


def merged(module, x):
    graphdef, state, rest = nnx.split(module, nnx.Param, ...)
    halves = jax.tree.map(lambda p: p / 2, state)
    return leaves(nnx.merge(graphdef, halves, rest), x)


def cloned(module, x):
    return leaves(nnx.clone(module), x) + leaves(copy.deepcopy(module), x)


def by_jit(module, x):
    return nnx.jit(leaves)(module, x)


def by_remat(module, x):
    return nnx.remat(leaves)(module, x)


def by_checkpoint(module, x):
    graphdef, state = nnx.split(module)
    return jax.checkpoint(lambda s: leaves(nnx.merge(graphdef, s), x))(state)


def by_closure(module, x):
    return jax.checkpoint(lambda y: y * leaves(module, x))(2.0)


def by_grad(module, x):
    return squares(jax.tree.leaves(nnx.grad(leaves)(module, x)))


def by_cond(module, x):
    other = lambda module, x: 0 * leaves(module, x)
    return nnx.cond(True, leaves, other, module, x)


def by_vmap(module, x):
    each = nnx.vmap(lambda module, i: i * leaves(module, x), in_axes=(None, 0))
    return each(module, jnp.arange(3.0)).sum()


def by_scan(module, x):
    start = 0 * leaves(module, x)
    add = lambda total, i: (total + i * leaves(module, x), None)
    return jax.lax.scan(add, start, jnp.arange(3.0))[0]


def by_carry(module, x):
    def add(carry, i):
        module, total = carry
        return module, total + i * leaves(module, x)

    scan = nnx.scan(add, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return scan((module, 0 * leaves(module, x)), jnp.arange(3.0))[1]


def mean(y: jax.Array) -> jax.Array:
    return jshard.pmean(jnp.mean(jnp.sin(y)))


def called(module, x):
    return mean(module(x))


def called_as_set(module, x):
    """A module whose weights are set first, as ``nnx.SpectralNorm`` does."""
    for value in params(module):
        value[...] = jnp.tanh(value[...])
    for value in params(module)[:1]:
        value[:] = 0.5  # is broadcast, in the dtype that there is
    return called(module, x)


def called_in_remat(module, x):
    return mean(nnx.remat(lambda module, x: module(x))(module, x))


def called_in_jit(module, x):
    return mean(nnx.jit(lambda module, x: module(x))(module, x))


def called_as_clone(module, x):
    return mean(nnx.clone(module)(x))


def called_unbound(module, x):
    """A method of the class as its author wrote it, which gathers nothing."""
    if isinstance(module, jshard.Stack):
        return jnp.zeros(())
    return mean(getattr(module, "plain_class", type(module)).__call__(module, x))


WAYS = [
    leaves, mapped, values, indexed, raw, graph, pure, operators, shapes, by_path,
    optax_norm, merged, cloned, by_jit, by_remat, by_checkpoint, by_closure, by_grad,
    by_cond, by_vmap, by_scan, by_carry, called, called_in_remat, called_in_jit,
    called_as_clone, called_unbound,
]  # fmt: skip
