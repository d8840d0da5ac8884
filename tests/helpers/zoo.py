"""Models that use Stack and Unit in every way."""

# Layers take and return what they like.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard
from zoo_layers import (
    LAYERS,
    WIDTH,
    Counting,
    Dense,
    Residual,
    Stateful,
    Toolbox,
    make_stack,
)


class ExtraArguments(nnx.Module):
    """A factor that all layers share, and integers, with gradients for the factor."""

    class Layer(Residual):
        def __call__(self, x, factor, shift):
            return super().__call__(x) * factor + shift["by"]

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unit = jshard.Unit(self.Layer(rngs))
        self.factor = nnx.Param(jnp.linspace(0.5, 1, WIDTH, dtype=float))
        self.odd = nnx.Param(jnp.ones(3, dtype=float))  # replicated

    def __call__(self, x):
        factor = self.factor[...] * self.odd[...].sum() / 3
        shift = {"by": jnp.arange(8)}
        return self.unit(self.blocks(x, factor, shift), factor, shift)


class StaticArguments(nnx.Module):
    """Flags, names, functions and None are what they are."""

    class Layer(Residual):
        def __call__(self, x, apply, scale=1.0, *, mask=None, name="", fn=jnp.tanh):
            assert isinstance(apply, bool)
            assert mask is None
            assert name in ("", "sin")
            return x + fn(super().__call__(x)) * scale if apply else x

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        x = self.unit(self.blocks(x, True, 0.5), False, 0.5)
        return self.unit(x, apply=True, scale=np.float64(2), name="sin", fn=jnp.sin)


class StaticResults(nnx.Module):
    class Layer(Residual):
        def __call__(self, x):
            return {"y": super().__call__(x), "name": "tanh", "times": 3, "no": None}

    def __init__(self, rngs):
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        out = self.unit(x)
        assert (out["name"], out["times"], out["no"]) == ("tanh", 3, None)
        return out["y"] * out["times"]


class Closures(nnx.Module):
    """Layers that reach values outside of themselves."""

    class Layer(Residual):
        outside: Any = None

        def __call__(self, x):
            return super().__call__(x) * type(self).outside

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unit = jshard.Unit(self.Layer(rngs))
        self.factor = nnx.Param(jnp.linspace(0.5, 1, WIDTH, dtype=float))
        self.odd = nnx.Param(jnp.ones(3, dtype=float))  # replicated

    def __call__(self, x):
        self.Layer.outside = self.factor[...] * self.odd[...].sum() / 3
        return self.unit(self.blocks(x))


class Aux(nnx.Module):
    """A pytree carry with a counter, and aux outputs that have gradients."""

    class Layer(Residual):
        def __call__(self, state):
            y = super().__call__(state["x"])
            after = {"x": y, "n": state["n"] + 1}
            return after, {"sum": jnp.sum(y**2, axis=1), "n": after["n"]}

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)

    def __call__(self, x):
        state, aux = self.blocks({"x": x, "n": jnp.int32(0)})
        assert aux["sum"].shape == (LAYERS, x.shape[0])
        sums = (aux["sum"] * aux["n"][:, None]).sum(0)
        return state["x"] * state["n"] + sums[:, None]


class UnitInStack(nnx.Module):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Dense(rngs), jshard.Unit(Residual(rngs))

        def __call__(self, x):
            return self.second(jnp.sin(self.first(x)))

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        return self.unit(self.blocks(x))


class StackInStack(nnx.Module):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.own = make_stack(Residual, rngs), Dense(rngs)

        def __call__(self, x):
            return jnp.sin(self.own(self.inner(x)))

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)

    def __call__(self, x):
        return self.blocks(x)


class Methods(nnx.Module):
    """Methods gather, those that a decorator wraps too; what is no method does not."""

    def __init__(self, rngs):
        self.unit: Any = jshard.Unit(Toolbox(rngs))

    def __call__(self, x):
        x = self.unit.transposed(self.unit.compiled(self.unit(x)))
        return self.unit.scale(self.unit.double(self.unit.forgotten(x)))


class Attend(nnx.Module):
    """A tied head by a method of the embedding."""

    def __init__(self, rngs):
        self.embed = jshard.Unit(
            nnx.Embed(16, WIDTH, dtype=float, param_dtype=float, rngs=rngs)
        )

    def __call__(self, x):
        tokens = jnp.argsort(x, axis=1)
        return self.embed.attend(jnp.tanh(self.embed(tokens).sum(1)))


class Gathered(nnx.Module):
    """Weights gathered before a loop, called and read in it."""

    def __init__(self, rngs):
        self.head, self.blocks = jshard.Unit(Dense(rngs)), make_stack(Residual, rngs)

    def __call__(self, x):
        head = jshard.gathered(self.head)
        inside = jax.sharding.get_abstract_mesh().manual_axes
        assert type(head) is Dense or not inside
        chunk = lambda c: head(c) + c @ head.kernel[...].T
        return jax.lax.map(jax.checkpoint(chunk), self.blocks(x)[:, None])[:, 0]


class GatheredBefore(Gathered):
    """The same, the head's gradient scattered before the blocks' backward."""

    def __call__(self, x):
        head, x = jshard.gathered(self.head, before=self.blocks(x))
        chunk = lambda c: head(c) + c @ head.kernel[...].T
        return jax.lax.map(jax.checkpoint(chunk), x[:, None])[:, 0]


class GatheredDuring(Gathered):
    """The same, gathered and scattered while a block runs."""

    def __call__(self, x):
        head, x = jshard.gathered(self.head, during=(self.blocks, x))
        chunk = lambda c: head(c) + c @ head.kernel[...].T
        return jax.lax.map(jax.checkpoint(chunk), x[:, None])[:, 0]


class Transforms(nnx.Module):
    """Units and Stacks under JAX's own transformations."""

    def __init__(self, rngs):
        self.unit, self.blocks = jshard.Unit(Residual(rngs)), make_stack(Dense, rngs)

    def __call__(self, x):
        y = jax.lax.map(lambda row: self.unit(row), x[:, None])[:, 0]
        y = y + jax.vmap(self.unit)(x) + jax.vmap(self.blocks)(x)
        return jax.checkpoint(lambda y: self.unit(self.blocks(y)))(y)


class ModuleArguments(nnx.Module):
    """A Unit passed to others, which call it."""

    class Layer(Residual):
        def __call__(self, x, other):
            return other(super().__call__(x))

    def __init__(self, rngs):
        self.shared, self.unit = jshard.Unit(Dense(rngs)), jshard.Unit(self.Layer(rngs))
        self.blocks = make_stack(self.Layer, rngs)

    def __call__(self, x):
        return self.blocks(self.unit(x, self.shared), self.shared)


class SharedParameters(nnx.Module):
    """One parameter in two Units, in a Unit and the root, and one Unit twice."""

    def __init__(self, rngs):
        self.a, self.b = jshard.Unit(Dense(rngs)), jshard.Unit(Dense(rngs))
        self.b.kernel = self.a.kernel
        self.c, self.d = jshard.Unit(Dense(rngs)), Dense(rngs)
        self.d.kernel = self.c.kernel
        self.e = self.a
        self.blocks = jshard.Stack(Residual, 9, rngs=rngs)  # most are in a Stack

    def __call__(self, x):
        for module in (self.a, self.b, self.c, self.d, self.e, self.blocks):
            x = jnp.sin(module(x))
        return x


class States(nnx.Module):
    """Statistics by pmean, counters, in Stacks, Units and the root."""

    def __init__(self, rngs):
        self.blocks, self.unit = make_stack(Stateful, rngs), jshard.Unit(Stateful(rngs))
        self.calls = Counting(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls[...] + 1)
        return self.unit(self.unit(self.blocks(x)))


class StateBetweenCalls(nnx.Module):
    """What one call stores and the next one reads carries a gradient."""

    class Layer(Dense):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.stored = Counting(jnp.zeros(WIDTH, dtype=float))

        def store(self, x):
            self.stored.set_value(jshard.pmean(jnp.mean(self(x), axis=0)))

        def load(self, x):
            return x * self.stored[...] + self.bias[...]

    def __init__(self, rngs):
        self.unit = jshard.Unit(self.Layer(rngs))

    def __call__(self, x):
        self.unit.store(x)
        return self.unit.load(x)


class OddAttributes(nnx.Module):
    """Attributes with the names of jshard's arguments."""

    class Layer(Residual):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.num_layers, self.units, self.policy = 2, 3, "none"

        def __call__(self, x):
            for _ in range(self.num_layers):
                x = super().__call__(x)
            return x * self.units

    def __init__(self, rngs):
        self.unit, self.blocks = (
            jshard.Unit(self.Layer(rngs)),
            make_stack(self.Layer, rngs),
        )

    def __call__(self, x):
        return self.blocks(self.unit(x)) * self.unit.num_layers


class NoParameters(nnx.Module):
    """Units without parameters, parameters without use, and containers."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dropout = jshard.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(x)

    def __init__(self, rngs):
        self.blocks = make_stack(self.Layer, rngs)
        self.unused = jshard.Unit(Dense(rngs))
        self.unit = jshard.Unit(nnx.Sequential(jshard.Unit(Dense(rngs)), jnp.tanh))
        self.each = nnx.List([jshard.Unit(Dense(rngs)), Residual(rngs)])

    def __call__(self, x):
        return self.each[1](self.each[0](self.unit(self.blocks(x))))


class FreshFunctions(nnx.Module):
    """Functions that are made with the model, and so differ each time it is made."""

    def __init__(self, rngs):
        self.activation = lambda x: jnp.tanh(x)
        init = nnx.initializers.uniform(1.0)  # nnx.Linear keeps it
        self.unit = jshard.Unit(
            nnx.Linear(WIDTH, WIDTH, param_dtype=float, kernel_init=init, rngs=rngs)
        )

    def __call__(self, x):
        return self.activation(self.unit(x))


MODELS = [
    ExtraArguments,
    StaticArguments,
    StaticResults,
    Closures,
    Aux,
    UnitInStack,
    StackInStack,
    Methods,
    Attend,
    Gathered,
    GatheredBefore,
    GatheredDuring,
    Transforms,
    ModuleArguments,
    SharedParameters,
    States,
    StateBetweenCalls,
    OddAttributes,
    NoParameters,
    FreshFunctions,
]
