"""Each Unit's gather waits for the Unit before it, in the program that XLA is given.

XLA may otherwise gather the weights of many Units at once, or take the backward's
gathers for the forward's and keep full weights in between. And it may keep the whole
gradients of all Units for one scatter.
"""

import dataclasses
import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import hlo
import jshard
from h100 import h100s
from jshard.sharding.settings.scopes import LAYERS
from jshard.system.compat.jaxprs import open_inner, variables

WIDTHS = (16, 24, 32, 40, 48)  # of features between Units: a weight tells its Unit
SHAPES = list(itertools.pairwise(WIDTHS))
DEVICES = 8
# Without devices no collectives are put in order, as they are for CPUs.
ABSTRACT = AbstractMesh(
    (1, DEVICES), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2
)


class Chain(nnx.Module):
    """Units that follow each other."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(
            jshard.Unit(nnx.Linear(*shape, rngs=rngs)) for shape in SHAPES
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum(model(x) ** 2), x.shape[0])


class Headed(nnx.Module):
    """A Unit whose transfers run beside the last layer of a Stack."""

    def __init__(self, rngs: nnx.Rngs):
        layer = lambda rngs: nnx.Linear(WIDTHS[0], WIDTHS[0], rngs=rngs)
        self.layers = jshard.Stack(layer, 3, rngs=rngs)
        self.head = jshard.Unit(nnx.Linear(*SHAPES[0], use_bias=False, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        head, x = jshard.gathered(self.head, during=(self.layers, x))
        return head(x)


def traced(mesh: Any, model: Any = Chain, **knobs: Any) -> Any:
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    fsdp = jshard.FSDP(mesh, policy)
    optimizer = optax.sgd(0.1)
    state = fsdp.abstract_state(model, optimizer)
    batch = jax.ShapeDtypeStruct((4 * DEVICES, WIDTHS[0]), jnp.float32)
    return fsdp.train_step(loss_fn, optimizer).trace(state, batch)


@dataclasses.dataclass(frozen=True)
class Gather:
    """A gather of a matrix, and how much must be computed before it."""

    shape: tuple[int, ...]
    products: int
    slices: int  # of full weights: the parts that are kept
    scatters: int = dataclasses.field(default=0, compare=False)


def gathers(jaxpr: Any) -> list[Gather]:
    """The gathers of a traced step, in order."""
    found: list[Gather] = []
    before: dict[Any, frozenset] = {}  # (name, id) of what a variable depends on

    def of(*atoms: Any) -> frozenset:
        return frozenset().union(*(before.get(x, ()) for x in variables(atoms)))

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if inner := open_inner(eqn):
                pairs = zip(inner.invars, eqn.invars, strict=True)
                before.update([(v, of(x)) for v, x in pairs])
                walk(inner)
                pairs = zip(eqn.outvars, inner.outvars, strict=True)
                before.update([(v, of(x)) for v, x in pairs])
                continue
            name, needs = eqn.primitive.name, of(*eqn.invars)
            shape = eqn.outvars[0].aval.shape
            if name.startswith("all_gather") and len(shape) == 2:
                count = Counter(kind for kind, _ in needs)
                kinds = ("dot_general", "dynamic_slice", "reduce_scatter")
                found.append(Gather(shape, *(count[kind] for kind in kinds)))
            before.update((v, needs | {(name, id(eqn))}) for v in eqn.outvars)

    walk(jaxpr)
    return found


@pytest.mark.parametrize("remat", ["full", "none"])
def test_each_gather_waits_for_the_products_of_the_unit_before_it(remat):
    step = traced(ABSTRACT, remat=remat)
    forward = [Gather(shape, done, 0) for done, shape in enumerate(SHAPES)]
    # Each Unit of the backward adds two products that the next one's gather waits for.
    last = 3 * len(SHAPES) - 2
    backward = [Gather(shape, last - 2 * i, 0) for i, shape in enumerate(SHAPES)]
    assert gathers(step.jaxpr.jaxpr) == [*forward, *reversed(backward)]


def test_each_gather_waits_until_the_unit_before_it_has_kept_its_parts():
    step = traced(ABSTRACT, reshard_after_forward=2)
    forward = [Gather(shape, done, done) for done, shape in enumerate(SHAPES)]
    found = gathers(step.jaxpr.jaxpr)
    assert found[: len(SHAPES)] == forward
    assert [x.products for x in found[len(SHAPES) :]] == [4, 6, 8, 10]


def test_each_gather_waits_until_gradients_of_the_unit_before_it_are_scattered():
    backward = gathers(traced(ABSTRACT).jaxpr.jaxpr)[len(SHAPES) :]
    assert [x.scatters for x in backward] == [0, 2, 4, 6]  # kernels and biases


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_collectives_beside_the_last_layer_count_as_the_layers(prefetch):
    step = traced(ABSTRACT, Headed, prefetch=prefetch)
    text = step.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    for kind in ("all_gather", "reduce_scatter"):
        found = re.findall(rf'loc\("(\w+\([^"]*/{kind})"', text)  # outside of loops
        assert found
        assert all(f"jvp({LAYERS})" in scopes for scopes in found), found


@pytest.mark.h100
def test_xla_merges_no_gathers_of_several_units():
    program = traced(h100s(DEVICES), remat="none").lower().compile()
    found = [
        [array.shape for array in x.results if len(array.shape) == 2]
        for x in hlo.collectives(str(program.as_text()))
        if x.kind == "all-gather"
    ]
    # The backward does not read the first weight: nothing before it is trained.
    assert sorted(found) == sorted([[shape] for shape in SHAPES + SHAPES[1:]])


@pytest.mark.h100
def test_xla_merges_no_scatters_of_several_units():
    program = traced(h100s(DEVICES)).lower().compile()
    found = [x for x in hlo.collectives(str(program.as_text())) if "scatter" in x.kind]
    # A kernel and a bias each.
    assert [len(x.results) for x in found] == [2] * len(SHAPES)
