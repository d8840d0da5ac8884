"""The class of a Unit is one that the user's own classes do not notice."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.sharding.axes.tensor import make_parallel
from jshard.system.compat.flax_modules import is_pytree
from zoo_layers import WIDTH, Dense

MADE: list[str] = []


class Kind(nnx.Module):
    """Every subclass says what kind it is."""

    kind: str

    def __init_subclass__(cls, *, kind: str, **options: Any):
        super().__init_subclass__(**options)
        cls.kind = kind
        MADE.append(kind)


class Registered:
    """Refuses a second class of the same name."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if cls.__name__ in MADE:
            raise ValueError(f"there is a {cls.__name__} already")
        MADE.append(cls.__name__)


class OfAKind(Dense, Kind, kind="dense"):
    pass


class InARegistry(Dense, Registered):  # after nnx.Module in the order of its bases
    pass


class BeforeModule(Registered, Dense):
    pass


class NoPytree(Registered, nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.dense = Dense(rngs)

    def __call__(self, x):
        return self.dense(x)


class Sealed(type(nnx.Module)):
    def __new__(cls, name, bases, namespace, **options):
        if any(isinstance(base, Sealed) for base in bases):
            raise TypeError(f"{name} is sealed")
        return super().__new__(cls, name, bases, namespace, **options)


class IsSealed(Dense, metaclass=Sealed):
    pass


class Root(nnx.Module):
    def __init__(self, layer: nnx.Module):
        self.layer = layer


@pytest.mark.parametrize("cls", [OfAKind, InARegistry, BeforeModule, NoPytree])
def test_a_unit_a_stack_and_a_parallel_layer_make_no_new_kind_of_module(cls):
    made = list(MADE)
    layer = filled(lambda: cls(nnx.Rngs(0)))
    x = jnp.ones((2, WIDTH))
    want = layer(x)
    unit = jshard.Unit(layer)
    assert isinstance(unit, cls)
    assert type(unit).__name__ == cls.__name__
    assert is_pytree(type(unit)) == is_pytree(cls)
    assert getattr(unit, "kind", "dense") == "dense"
    assert jnp.array_equal(unit(x), want)
    make_stack = lambda: jshard.Stack(cls, 2, rngs=nnx.Rngs(0))
    assert isinstance(nnx.eval_shape(make_stack), cls)
    root = Root(filled(lambda: cls(nnx.Rngs(0))))
    make_parallel(root, {("layer",): jshard.nn.Split()})
    assert isinstance(root.layer, cls)
    assert made == MADE


def test_a_metaclass_that_refuses_is_named():
    layer = filled(lambda: IsSealed(nnx.Rngs(0)))
    with pytest.raises(jshard.UserError, match="IsSealed, which its metaclass Sealed"):
        jshard.Unit(layer)
