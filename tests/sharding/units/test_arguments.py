"""What a call of a unit does to its arguments, and to what it returns."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from runs import POLICY
from zoo_layers import Dense, example

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
    pytest.mark.filterwarnings("ignore:parameter .* is read outside of its unit"),
]


class Count(nnx.Variable):
    """How often something was called."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Context:
    total: Any
    calls: int = dataclasses.field(default=0, metadata={"static": True})


class Writes(Dense):
    """Writes into all that it is passed."""

    def __call__(self, x, aux, again, *hidden, cache, count, same):
        y = jnp.tanh(super().__call__(x))
        again["context"].total += jnp.sum(y**4, -1)
        again["context"].calls += 1
        aux["penalty"] += jnp.mean(y**2, -1)
        again["penalty"] *= 2.0  # the same dict
        aux["deep"][0].append(y)
        hidden[0].insert(0, y)
        cache["seen"] = jnp.sum(y, -1)
        cache["first"] = aux["deep"][0]
        del aux["old"]
        count.set_value(count.get_value() + 1)
        self.last = y
        return (y if same is x else x), aux, count


class Writing(nnx.Module):
    """Its units share a list, which it holds; ``seen`` is an NNX dict."""

    def __init__(self, rngs):
        self.first, self.second = Writes(rngs), Writes(rngs)
        self.hidden, self.seen = [], nnx.Dict()
        self.count = Count(jnp.zeros(()))

    def __call__(self, x):
        totals = []
        self.hidden.clear()
        context = Context(jnp.zeros(len(x)))
        for layer in (self.first, self.second):
            aux = {"penalty": jnp.zeros(len(x)), "deep": ([],), "old": 1}
            aux["context"] = context
            kept = aux["deep"][0]
            x, returned, count = layer(
                x, aux, aux, self.hidden, cache=self.seen, count=self.count, same=x
            )
            assert returned is aux
            assert count is self.count
            assert "old" not in aux
            returned["penalty"] += 1.0
            assert kept is self.seen["first"]
            totals += [aux["penalty"], jnp.sum(kept[0], -1), self.seen["seen"]]
        weights = zip((0.1, 0.2), self.hidden, strict=True)
        totals += [w * jnp.sum(y**3, -1) for w, y in weights]
        totals.append(context.total * context.calls)
        return sum(totals) + self.count.get_value() + jnp.sum(self.first.last, -1)


def losses(model: nnx.Module, x: jax.Array) -> jax.Array:
    y = model(x)
    return jnp.sin(y) + y**2


def plain(make: Any, steps: int = 2) -> list[Any]:
    """Losses and gradient norms of plain Flax, JAX and optax."""
    graphdef, params, rest = nnx.split(
        filled(lambda: make(nnx.Rngs(0))), nnx.Param, ...
    )

    @jax.jit
    def step(params, rest):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            total = jnp.mean(losses(model, example()))
            after = dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))))
            kept = [(path, after[path]) for path, _ in nnx.to_flat_state(rest)]
            return total, nnx.from_flat_state(kept)

        (total, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return new, rest, total, optax.tree.norm(grads)

    found = []
    for _ in range(steps):
        params, rest, *values = step(params, rest)
        found.append(values)
    return found


def sharded(make: Any, *units: type, steps: int = 2) -> list[Any]:
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:2]), POLICY, units=units)
    tx = optax.sgd(0.1)
    state = fsdp.from_model(filled(lambda: make(nnx.Rngs(0))), tx)

    def loss(model, x):
        return jshard.Mean(jnp.sum(losses(model, x)), len(x))

    step, found = fsdp.train_step(loss, tx), []
    for _ in range(steps):
        state, metrics = step(state, fsdp.shard_batch(np.asarray(example())))
        found.append([metrics["loss"], metrics["grad_norm"]])
    return found


def test_what_a_unit_writes_into_its_arguments_is_there_after_the_call():
    want = plain(Writing)
    np.testing.assert_allclose(sharded(Writing, Writes), want, rtol=1e-9)


class Shares(Dense):
    """Hands out a part of itself, which counts its calls."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.part, self.parts = Counts(rngs), nnx.List([Counts(rngs)])

    def __call__(self, x):
        return jnp.tanh(super().__call__(x))

    def get(self, index=None):
        return self.part if index is None else self.parts[index]

    def both(self):
        return {"parts": [self.get(), self.get(0)], "count": self.part.count}


class Counts(Dense):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.count = Count(jnp.ones(()))

    def __call__(self, x):
        self.count.set_value(1.5 * self.count.get_value() + 1)
        self.mean = jnp.mean(x, -1, keepdims=True)
        return super().__call__(x) * self.count.get_value()


class Sharing(nnx.Module):
    def __init__(self, rngs):
        self.shares = Shares(rngs)

    def __call__(self, x):
        y = self.shares.get()(self.shares(x)) + self.shares.get(0)(x)
        (first, second), count = self.shares.both().values()
        first.mean += 1.0
        assert first is self.shares.part
        assert second is self.shares.parts[0]
        assert count is first.count
        count.set_value(count.get_value() + self.shares.parts[0].count.get_value())
        y = first(y) * count.get_value() + second.mean + self.shares.part.mean
        return jnp.sum(y, -1)


@pytest.mark.quick("in a unit")
@pytest.mark.parametrize(
    "units", [(Shares,), (Shares, Counts)], ids=["in a unit", "a unit"]
)
def test_a_part_that_a_unit_returns_is_that_part(units):
    want = plain(Sharing)
    np.testing.assert_allclose(sharded(Sharing, *units), want, rtol=1e-9)


class Result:
    """What a model of another package returns: no pytree."""

    def __init__(self, y: Any):
        self.y = y


LEFT: list[Any] = []


class Foreign(Dense):
    """Returns and changes what JAX does not look into."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.log, self.record = Result(None), None

    def __call__(self, x, cache: Any = None):
        cache["y"] = x
        return super().__call__(x)

    def result(self, x):
        return {"out": Result(self(x, {}))}

    def closure(self, x):
        y = self(x, {})
        return lambda: y

    def chunks(self, x):
        yield self(x, {})

    @contextlib.contextmanager
    def scope(self, x):
        yield x

    def sets(self, x):
        self.record = SimpleNamespace(y=self(x, {}))

    def logs(self, x):
        self.log.y = self(x, {})

    def writes(self, x, *, context):
        context.y = self(x, {})

    def passes(self, result, add, query, key):
        self(add(query) * result.y, {})
        return result, add, {"type": Result, "same": query is key, "n": None}

    def leaves(self, x):
        LEFT.append(self(x, {}))
        return x

    def appends(self, x, seen):
        seen["all"].append(lambda: x)


class Holds(nnx.Module):
    def __init__(self, rngs):
        self.layer = Foreign(rngs)
        self.stack = jshard.Stack(Foreign, 2, rngs=rngs)


@pytest.fixture(scope="module")
def held():
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY, units=(Foreign,))
    return fsdp, fsdp.from_model(filled(lambda: Holds(nnx.Rngs(0))), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, x: m.layer.result(x),
            "Foreign.result returns a Result, which is no",
        ),
        (lambda m, x: m.layer.closure(x), "Foreign.closure returns a function, which"),
        (lambda m, x: m.layer.chunks(x), "Foreign.chunks returns a generator, which"),
        (lambda m, x: m.layer.scope(x), "Foreign.scope returns a _GeneratorContext"),
        (lambda m, x: m.layer.sets(x), "puts into its attribute 'record' a SimpleNam"),
        (lambda m, x: m.layer.logs(x), "puts arrays into its attribute 'log', a Res"),
        (
            lambda m, x: m.layer.writes(x, context=Result(x)),
            "puts arrays into its argument 'context', a Result, which is not a pytree",
        ),
        (
            lambda m, x: m.layer(x, nnx.State({})),
            "Foreign changes its argument 'cache', a State; a jshard unit gives back",
        ),
        (
            lambda m, x: m.layer.leaves(x) + LEFT.pop(),
            "a layer in units=, or a function that JAX traced, put into a global",
        ),
        (
            lambda m, x: m.layer.appends(x, {"all": []}),
            "puts into its argument 'seen' a function, which is not a pytree",
        ),
        (
            lambda m, x: m.stack(x, {}),
            "Foreign, a stacked layer, changes its argument 'cache', which all layers",
        ),
    ],
)
def test_what_cannot_leave_a_unit_is_refused_by_its_name(held, call, message):
    fsdp, state = held

    def loss(model, x):
        y = call(model, x)
        return jshard.Mean(jnp.sum(y), len(x))

    with pytest.raises(jshard.UserError, match=message):
        fsdp.eval_step(loss)(state, fsdp.shard_batch(np.asarray(example())))


def test_objects_that_hold_nothing_new_pass(held):
    fsdp, state = held
    outside = Result(jnp.ones(()))

    def loss(model, x):
        shift = jnp.sum(x)
        result, add, rest = model.layer.passes(outside, lambda y: y + shift, x, x)
        assert result is outside
        assert rest == {"type": Result, "same": True, "n": None}
        return jshard.Mean(jnp.sum(add(x)), len(x))

    fsdp.eval_step(loss)(state, fsdp.shard_batch(np.asarray(example())))
